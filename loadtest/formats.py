"""Numbers as tables show them."""


def format_number(value: float | None) -> str:
    """Formats a value with at most four significant digits; None as a dash."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
