"""A page in the report's style, with its scripts: one file that needs nothing beside it."""

from __future__ import annotations

from html import escape
from typing import Any


def make_page(title: str, body: str, *, heading: bool = True, graph: str = "") -> str:
    """Return a page in the report's style around the HTML of its body, with a filter of its tables' rows.

    `heading` is whether the title is shown, and `graph` are the scripts of graphs in the body.
    """
    from markupsafe import Markup

    shown = f"<h1>{escape(title)}</h1>\n" * heading
    content = Markup(f"<section>{shown}{body}</section>")
    return render_page("base.html.j2", title=title or "Dyno", content=content, graph=graph)


def render_page(template: str, *, graph: str, **values: Any) -> str:
    """Render a template of the page with its style and scripts, and the scripts of graphs."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FunctionLoader(_file_of_page), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    style, script, zoom = map(_file_of_page, ("page.css", "page.js", "svg-pan-zoom.min.js"))
    return environment.get_template(template).render(
        **values, style=Markup(style), script=Markup(script), zoom=Markup(zoom), graph=Markup(graph)
    )


def _file_of_page(name: str) -> str:
    from importlib import resources

    return (resources.files("dyno.report") / "page" / name).read_text(encoding="utf-8")
