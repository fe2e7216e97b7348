"""The metrics of several replicas as one page of Prometheus's text format."""

from collections.abc import Iterator, Mapping


def merged_metrics(texts: Mapping[str, str]) -> str:
    """Returns all samples of the pages, by replica, each with the label `replica`. What belongs to one metric stands
    together, as the format wants it, below one description."""
    descriptions: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, text in texts.items():
        for name, description, lines in _families(text):
            descriptions.setdefault(name, description)
            samples.setdefault(name, []).extend(_labelled(line, replica) for line in lines)
    parts = (line for name in descriptions for line in (*descriptions[name], *samples[name]))
    return "".join(f"{line}\n" for line in parts)


def _families(text: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yields each metric's name, its lines of HELP and TYPE, and its samples."""
    name, description, lines = "", list[str](), list[str]()
    for line in text.splitlines():
        if line.startswith("# HELP "):
            if name:
                yield name, description, lines
            name, description, lines = line.split(" ", 3)[2], [line], []
        elif line.startswith("#"):
            description.append(line)
        elif line:
            lines.append(line)
    if name:
        yield name, description, lines


def _labelled(line: str, replica: str) -> str:
    name = line.split("{", 1)[0].split(" ", 1)[0]
    rest = line[len(name) :]
    if rest.startswith("{"):
        return f'{name}{{replica="{replica}",{rest[1:]}'
    return f'{name}{{replica="{replica}"}}{rest}'
