"""HTML pages from templates: texts are shown and never obeyed."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from common.errors import UserError
from common.files import atomic_file
from common.wording import printable


def write_page(path: str | Path, template: str, folder: Path, flag: str = "", **content: object) -> None:
    """Write the page of a template that lies in `folder`.

    flag: that names the path. Errors: OSError; where there is a flag, UserError that begins with it.
    """
    loader = FileSystemLoader([folder, Path(__file__).parent])
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, finalize=for_browser)
    page = environment.get_template(template).render(content)
    try:
        with atomic_file(path) as file:
            # A file name that is not UTF-8 holds lone surrogates, which are shown as \udcff.
            file.write(page.encode(errors="backslashreplace"))
    except OSError as error:
        if not flag:
            raise
        raise UserError(f"{flag}: {path} cannot be written ({error.strerror})") from error


def for_browser(value: object) -> object:
    """What a template writes: of a text, characters that reorder or hide it are spelt out; drawings are markup already."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return printable(value)
    return value
