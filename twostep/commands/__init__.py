"""The commands of `twostep` beside those of the server: one file each, with `main(arguments)`, which returns the exit
code, and `parser()`, which says what it takes."""
