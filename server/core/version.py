"""The version of the installed package."""

from importlib.metadata import PackageNotFoundError, version


def _installed_version() -> str:
    try:
        return version("twostep")
    except PackageNotFoundError:
        return "0+source"


VERSION = _installed_version()
