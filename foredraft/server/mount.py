"""Where the page is put in, if it is installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

from fastapi import FastAPI

from foredraft.server.context import ServerContext

_MODULE = "foredraft.server.page_routes"


def include_page(app: FastAPI, context: ServerContext) -> Callable[[str], bool]:
    """Add the page's routes; says which of their paths need no key (its static files).

    Among those that the page names, one that ends with / stands for all that is below it.
    """
    if find_spec(_MODULE) is None:
        return lambda path: False
    page = import_module(_MODULE)
    page.include_page(app, context)
    whole = frozenset(path for path in page.OPEN_PATHS if path == "/" or not path.endswith("/"))
    below = tuple(path for path in page.OPEN_PATHS if path not in whole)
    return lambda path: path in whole or path.startswith(below)
