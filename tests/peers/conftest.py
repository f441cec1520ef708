"""Sidestep's losses against other implementations: `agree` compares and keeps the differences."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

HERE = Path(__file__).parent

pytest.register_assert_rewrite("peers_support")

# Of a loss and of a gradient, both of order 1 on the tensors used here.
TOLERANCE = 1e-6

_found: dict[tuple[str, str, str], float] = {}


def pytest_configure(config):
    config.addinivalue_line("markers", "peers: needs verl or TRL, in an environment of its own")


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.peers)


class Agreement:
    """Compares a peer's numbers with ours, and keeps the largest difference under a name."""

    def __init__(self, peer):
        self.peer = peer

    def __call__(self, what, ours, theirs, of="value"):
        """Equal to TOLERANCE in every element."""
        assert ours.shape == theirs.shape, f"{what}: {tuple(ours.shape)}, {tuple(theirs.shape)}"
        difference = float((ours - theirs).detach().abs().max())
        message = f"{what}, {of}: ours and {self.peer}'s differ by {difference:.3g}"
        assert difference <= TOLERANCE, message
        key = (self.peer, what, str(theirs.dtype).removeprefix("torch."))
        _found[key] = max(_found.get(key, 0.0), difference)

    def in_gradient(self, what, ours, theirs):
        """Of two Results; a gradient of 0 everywhere would agree with anything broken."""
        assert bool(theirs.gradient.any()), f"{what}: {self.peer} has no gradient"
        self(what, ours.gradient, theirs.gradient, of="gradient")

    def in_loss_and_gradient(self, what, ours, theirs):
        self(what, ours.loss, theirs.loss)
        self.in_gradient(what, ours, theirs)


@pytest.fixture
def agree(request):
    return Agreement(request.module.PEER)


def pytest_terminal_summary(terminalreporter):
    """The table of docs/peers.md. Departures agree only after being undone: not in it."""
    same = sorted({key[:2] for key in _found if not key[1].startswith("departure")})
    if not same:
        return
    write = terminalreporter.write_line
    terminalreporter.section("largest differences to peers, in value or gradient")
    write("| what | peer | float64 | float32 |")
    write("| --- | --- | --- | --- |")
    for peer, what in same:
        cells = [
            f"{_found[peer, what, dtype]:.0e}" if (peer, what, dtype) in _found else "-"
            for dtype in ("float64", "float32")
        ]
        write(f"| {what} | {peer} {metadata.version(peer)} | {' | '.join(cells)} |")
