"""Checks ``report.html``: made anew from the evidence, it must be the same page to the byte.

The page of a run is made from the evidence, and from the history in ``run.json``. Nothing seals the times and the
history that a page shows. They are read as they are, so a page cannot show others than those files have.
"""

from __future__ import annotations

from pathlib import Path

import steelman
from steelman.bounded import read_bytes
from steelman.evidence.bundle import Bundle, DamagedError
from steelman.evidence.rebuild import check_times, evaluation_of

PAGE = "report.html"
MOST_BYTES = 1 << 28


def page_of(folder: Path) -> str:
    """The page of the evidence in `folder`."""
    from steelman.report import Entry, html  # the report reads evidence, so this import would be a cycle

    found = evaluation_of(folder)
    return html.render([Entry(name=found.model, evaluation=found)], title=f"{found.model} on {found.data}")


def check_page(folder: Path, bundle: Bundle) -> str:
    """Raise if a page is not that of its evidence. Returns why a page could not be checked, or an empty text.

    `folder` is the folder that was asked for. If it is a run, its page is checked too.
    """
    check_times(bundle)
    pages = [place for place in dict.fromkeys((bundle.folder, folder)) if (place / PAGE).exists()]
    if pages and bundle.version != steelman.__version__:
        return f"steelman {bundle.version} wrote it"
    for place in pages:
        if place != bundle.folder and not (place / "run.json").is_file():
            return f"{place / PAGE} is the page of a run that is not finished"
        made = page_of(place) if place == bundle.folder else _page_of_run(place)
        if read_bytes(place / PAGE, most_bytes=MOST_BYTES) != made.encode():
            raise DamagedError(
                f"{place / PAGE} is not the page of this evidence, or times.json or the history in run.json were "
                "changed; delete the page, or make it anew"
            )
    return ""


def _page_of_run(folder: Path) -> str:
    from steelman.report import html  # the training uses evaluations, so these imports would be cycles
    from steelman.training.finish import entries_of
    from steelman.training.folder import without_model

    run = without_model(folder)
    return html.render(entries_of(run, run.evaluation.model), title=f"{run.evaluation.model} on {run.evaluation.data}")
