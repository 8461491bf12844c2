"""A format of data sets: labels.csv beside the photos, with the columns `photo` (its path there) and `class`."""

from __future__ import annotations

import csv
from pathlib import Path

from dyno.data.data_format import DataFormat, ScanRequest
from dyno.data.photos import Listing, Photo, clean_name
from dyno.worker.spec import UserError

TABLE = "labels.csv"


class PhotoTable(DataFormat):
    """The table itself, or its folder. Every photo is tested on, but for those that Dyno sets aside to calibrate on."""

    name = "photo_table"
    described = "a table of photos"
    suffixes = (".csv",)
    labels = "classes"

    def fits(self, path: Path) -> bool:
        """By the table alone: whether it is right is for `scan` to say."""
        return (path / TABLE).is_file() if path.is_dir() else path.suffix in self.suffixes

    def scan(self, path: Path, request: ScanRequest) -> Listing:
        """A label is the class's place in the classes' order."""
        table = path / TABLE if path.is_dir() else path
        with open(table, encoding="utf-8", newline="") as f:
            rows = list(csv.DictReader(f))
        if not rows or not {"photo", "class"} <= rows[0].keys():
            raise UserError(f"{table} has no rows with the columns photo and class")
        classes = sorted({row["class"] for row in rows})
        photos = [
            Photo(table.parent / row["photo"], clean_name(row["photo"]), classes.index(row["class"]), "test")
            for row in rows
        ]
        if lost := [photo.name for photo in photos if not photo.path.is_file()]:
            raise UserError(f"{table} lists {lost[0]}, which isn't there")
        return Listing(clean_name(table.parent.name), classes, photos, metadata={"label_source": "table"})


PHOTO_TABLE = PhotoTable()
