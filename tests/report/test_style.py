from matplotlib.figure import Figure

from gcfed.report.style import GREY, PALETTE, UNFINISHED, look, looks, save


def test_series_differ_in_colour_and_without():
    seen = [look(i) for i in range(28)]
    assert len({(s.color, s.dashes) for s in seen}) == 28
    assert len({(s.marker, s.dashes) for s in seen}) == 28
    assert {s.color for s in seen} < set(PALETTE)
    assert GREY not in PALETTE
    assert UNFINISHED not in [s.dashes for s in seen]


def test_a_look_a_label():
    found = looks(["a", "b", "a", "c"])
    assert list(found) == ["a", "b", "c"]
    assert found["c"] == look(2)
    assert looks(["x", "c", "y"], found) == {"x": look(0), "c": look(2), "y": look(1)}
    assert found["a"].line(dashes=UNFINISHED)["linestyle"] == UNFINISHED


def test_saved_again_the_layout_is_the_same(tmp_path):
    figure = Figure()
    axes = figure.subplots()
    axes.set_ylabel("a label")
    save(figure, tmp_path / "a.png")
    place = axes.get_position().bounds
    axes.set_ylabel("a label\nof three\nlines")
    save(figure, tmp_path / "a.pdf")
    assert axes.get_position().bounds == place
    assert b"CreationDate" not in (tmp_path / "a.pdf").read_bytes()
