"""Claims about settings: flag, then environment, then file, then default; unknown keys suggest the nearest."""

from __future__ import annotations

from pathlib import Path

import pytest

from agora.node.settings import Settings, SettingsError, load

OWNERS_PAGE = Path(__file__).resolve().parents[2] / "docs" / "use" / "owner.md"


def test_precedence_is_flag_environment_file_default(tmp_path: Path) -> None:
    file = tmp_path / "agora.toml"
    file.write_text('threads = 1\ndevice = "cpu"\nlog_level = "debug"\n')
    settings = load(file, {"threads": 3}, {"AGORA_THREADS": "2", "AGORA_DEVICE": "cuda:1", "PATH": "/bin"})
    assert (settings.threads, settings.device, settings.log_level, settings.stages) == (3, "cuda:1", "debug", "auto")


@pytest.mark.parametrize(
    ("file", "environment", "flags", "expected"),
    [
        ("thread = 1\n", {}, {}, "sets the unknown thread; did you mean threads?"),
        ("", {"AGORA_DEVISE": "cpu"}, {}, "the environment sets the unknown AGORA_DEVISE; did you mean AGORA_DEVICE?"),
        ("threads = -1\n", {}, {}, "sets threads wrongly: "),
        ("", {"AGORA_THREADS": "many"}, {}, "the environment sets threads wrongly: "),
        ("memory_gib = inf\n", {}, {}, "sets memory_gib wrongly: Input should be a finite number"),
        ("", {}, {"stages": "3-1"}, "the command line sets stages wrongly: 3-1 is not a span"),
        ("", {}, {"listen": ("nowhere",)}, "'nowhere' is not an address; write /ip4/"),
        ("", {}, {"listen": ("1.2.3.4:99999",)}, "is not an address"),
        ("", {}, {"link": "20Mbit"}, "the command line sets link wrongly: '20Mbit' is not a link; write RATE,RTT"),
        ("threads = \n", {}, {}, "is not TOML"),
        (
            "",
            {"AGORA_AT_END": "go-on"},
            {"queue": ("poems",)},
            "contradict each other, at_end from the environment and queue from the command line: with at_end = go-on",
        ),
    ],
)
def test_each_mistake_is_one_sentence_that_names_its_place(
    tmp_path: Path, file: str, environment: dict[str, str], flags: dict[str, object], expected: str
) -> None:
    path = tmp_path / "agora.toml"
    path.write_text(file)
    with pytest.raises(SettingsError) as caught:
        load(path, flags, environment)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_only_a_contradiction_of_which_a_part_is_a_flag_is_wrong_usage(tmp_path: Path) -> None:
    path = tmp_path / "agora.toml"
    path.write_text('at_end = "go-on"\n')
    with pytest.raises(SettingsError) as with_flag:
        load(path, {"queue": ("poems",)}, {})
    with pytest.raises(SettingsError) as without:
        load(path, {}, {"AGORA_QUEUE": "poems"})
    assert (with_flag.value.exit_code, without.value.exit_code) == (2, 1)
    assert f"at_end from {path}" in str(with_flag.value)


def test_a_link_is_one_setting_with_commas_in_it(tmp_path: Path) -> None:
    settings = load(tmp_path / "none", {}, {"AGORA_LINK": "20Mbit, 50ms"})
    assert settings.link == "20Mbit,50ms" and settings.link_spec is not None and settings.link_spec.rtt_s == 0.05
    assert load(tmp_path / "none", {}, {}).link_spec is None


def test_the_folder_of_a_base_model_is_a_setting_like_any_other(tmp_path: Path) -> None:
    assert load(tmp_path / "none", {}, {"AGORA_BASE_MODEL": "/models/one"}).named_base_model == Path("/models/one")
    assert load(tmp_path / "none", {}, {}).named_base_model is None


def test_addresses_may_be_written_both_ways(tmp_path: Path) -> None:
    settings = load(tmp_path / "none", {}, {"AGORA_LISTEN": "0.0.0.0:31330, /ip4/127.0.0.1/tcp/0"})
    assert settings.listen == ("/ip4/0.0.0.0/tcp/31330", "/ip4/127.0.0.1/tcp/0")


@pytest.mark.parametrize(
    ("given", "listened"),
    [
        ("[::]:31330", "/ip6/::/tcp/31330"),
        ("[::1]:0", "/ip6/::1/tcp/0"),
        ("[2001:DB8::0:7]:31330", "/ip6/2001:db8::7/tcp/31330"),
        ("[::ffff:10.0.0.1]:1", "/ip6/::ffff:a00:1/tcp/1"),
        ("10.0.0.1:00080", "/ip4/10.0.0.1/tcp/80"),
    ],
)
def test_an_address_with_a_port_may_be_of_either_family(tmp_path: Path, given: str, listened: str) -> None:
    assert load(tmp_path / "none", {"listen": (given,)}, {}).listen == (listened,)
    assert load(tmp_path / "none", {}, {"AGORA_ANNOUNCE": f"{given}, 127.0.0.1:1"}).announce[0] == listened


@pytest.mark.parametrize(
    "given",
    [
        "::1:31330",
        "[::]31330",
        "[::]",
        "[]:1",
        "[::]:65536",
        "[::]:",
        "[fe80::1%eth0]:1",
        "[127.0.0.1]:1",
        "1.2.3.400:1",
    ],
)
def test_what_is_not_an_address_with_a_port_is_refused_with_both_forms(tmp_path: Path, given: str) -> None:
    with pytest.raises(SettingsError, match=r"0\.0\.0\.0:31330, or for IPv6 \[::\]:31330"):
        load(tmp_path / "none", {"listen": (given,)}, {})


def test_private_addresses_and_upnp_are_off_and_relaying_is_bounded_by_the_owner(tmp_path: Path) -> None:
    made = load(tmp_path / "agora.toml", {}, {})
    assert (made.allow_private, made.upnp, made.relay_peers, made.relay_mbit) == (False, False, 16, 0.0)
    chosen = load(tmp_path / "agora.toml", {}, {"AGORA_ALLOW_PRIVATE": "true", "AGORA_RELAY_PEERS": "0"})
    assert chosen.allow_private and chosen.relay_peers == 0
    with pytest.raises(SettingsError, match="relay_peers"):
        load(tmp_path / "agora.toml", {}, {"AGORA_RELAY_PEERS": "2000"})


def test_the_owners_page_names_every_setting() -> None:
    page = OWNERS_PAGE.read_text(encoding="utf-8")
    assert not [name for name in Settings.model_fields if f"`{name}" not in page]


@pytest.mark.parametrize(
    ("environment", "announced"),
    [
        ({"VAST_TCP_PORT_31330": "40123", "PUBLIC_IPADDR": "203.0.113.7"}, ("/ip4/203.0.113.7/tcp/40123",)),
        ({"RUNPOD_TCP_PORT_31330": "10987", "RUNPOD_PUBLIC_IP": "198.51.100.4"}, ("/ip4/198.51.100.4/tcp/10987",)),
        ({"VAST_TCP_PORT_31331": "40123", "PUBLIC_IPADDR": "203.0.113.7"}, ()),
        ({"VAST_TCP_PORT_31330": "40123"}, ()),
        ({"VAST_TCP_PORT_31330": "99999", "PUBLIC_IPADDR": "203.0.113.7"}, ()),
        ({"VAST_TCP_PORT_31330": "40123", "PUBLIC_IPADDR": "evil.example/p2p"}, ()),
    ],
)
def test_a_port_that_a_rented_machine_maps_is_announced(
    tmp_path: Path, environment: dict[str, str], announced: tuple[str, ...]
) -> None:
    listen = {"listen": ("0.0.0.0:31330", "[::]:31330")}
    assert load(tmp_path / "none", listen, environment).announce == announced
    own = environment | {"AGORA_ANNOUNCE": "/dns4/home.example/tcp/1"}
    assert load(tmp_path / "none", listen, own).announce == ("/dns4/home.example/tcp/1",)
    assert load(tmp_path / "none", {}, environment).announce == (), "port 0 is mapped to nothing"


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9464", ("127.0.0.1", 9464)),
        ("localhost:0", ("127.0.0.1", 0)),
        (":9464", ("127.0.0.1", 9464)),
        ("[::1]:9464", ("::1", 9464)),
        ("0.0.0.0:9464", ("0.0.0.0", 9464)),
        ("", None),
    ],
)
def test_metrics_are_served_on_loopback_unless_told_otherwise(text: str, address: tuple[str, int] | None) -> None:
    assert Settings(metrics=text).metrics_address == address


@pytest.mark.parametrize("text", ["9464", "trainer:9464", "127.0.0.1:70000", "127.0.0.1", "::1:9464", "[127.0.0.1:9"])
def test_an_address_for_metrics_that_is_none_is_named_with_a_right_one(tmp_path: Path, text: str) -> None:
    with pytest.raises(SettingsError, match="metrics.*is not HOST:PORT; write 127.0.0.1:9464"):
        load(tmp_path / "none.toml", {"metrics": text}, {})
