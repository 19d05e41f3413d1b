"""Photographs a report's page: report_page.png, report_page_dark.png and report_page_390.png.

``python docs/images/report_page.py [logs/report/index.html]``; needs Chromium. docs/reports.md has
the commands that made the runs.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from gcfed.utils.resolvers import ROOT

FOLDER = Path(__file__).parent
LIGHT, DARK = "preferredColorScheme=1", "preferredColorScheme=0"
#: Name → width and height in pixels, and the colour scheme.
PICTURES = {
    "report_page": (1280, 860, LIGHT),
    "report_page_dark": (1280, 860, DARK),
    "report_page_390": (390, 844, LIGHT),
}
NARROWEST = 500  # Chromium makes no narrower window


def photograph(page: Path, target: Path, width: int, height: int, scheme: str) -> None:
    """Writes the top of the page as a PNG of this size.

    A narrow page is shown in a frame of its width within a wider window.
    """
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("Chromium is not installed.")
    with tempfile.TemporaryDirectory() as name:
        frame = Path(name) / "frame.html"
        style = f"border:0;width:{width}px;height:{height}px"
        frame.write_text(
            f'<body style="margin:0"><iframe src="{page.as_uri()}" style="{style}" scrolling="no">'
        )
        picture = Path(name) / "picture.png"
        options = [
            "--headless",
            "--no-sandbox",
            "--hide-scrollbars",
            "--allow-file-access-from-files",
            f"--blink-settings={scheme}",
            f"--user-data-dir={name}/profile",
            f"--window-size={max(width, NARROWEST)},{height}",
            f"--screenshot={picture}",
        ]
        shown = page if width >= NARROWEST else frame
        subprocess.run([browser, *options, shown.as_uri()], check=True, capture_output=True)
        with Image.open(picture) as image:
            cut = image.convert("RGB").crop((0, 0, width, height))
            cut.quantize(256).save(target, optimize=True)


def main() -> None:
    page = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "logs" / "report" / "index.html"
    for name, (width, height, scheme) in PICTURES.items():
        photograph(page.resolve(), FOLDER / f"{name}.png", width, height, scheme)


if __name__ == "__main__":
    main()
