"""The settings of a site, which its owner writes to ``gcfed.yaml``."""

from gcfed_sites.site import Settings


def test_a_path_of_a_site_may_begin_at_the_home_folder(tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    file = tmp_path / "gcfed.yaml"
    file.write_text("arrays: ~/own.npz\nstates: states\n")
    settings = Settings.read(file)
    assert settings.arrays == str(home / "own.npz")
    assert settings.states == str(tmp_path / "states")
