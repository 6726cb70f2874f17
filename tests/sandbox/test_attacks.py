"""Every attack in every isolated mode that this machine has: contained, as seen from outside."""

import pytest
from hostile_world import Attack, attacks, close_world, open_world

from etude.sandbox import CellResult, Isolation, RunStatus, SandboxUnavailableError
from etude.sandbox.guest.cells import MAX_IMAGE_BYTES, MAX_TRACEBACK


@pytest.fixture(scope="module", params=[Isolation.BUBBLEWRAP, Isolation.NAMESPACES], ids=lambda mode: mode.value)
def world(request):
    try:
        world = open_world(request.param)
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    yield world
    close_world(world)


def test_there_are_at_least_sixty():
    assert len(attacks()) >= 60


@pytest.mark.parametrize("path", attacks(), ids=lambda path: path.name)
def test_an_attack_is_contained(world, path):
    attack = Attack.read(path)
    if attack.language not in world.executor.languages:
        pytest.skip(f"{attack.language.value} is not installed")
    (judge_session if attack.session else judge_run)(world, attack)
    world.check()


def judge_run(world, attack):
    result = world.run(attack)
    told = result.stdout + result.stderr + str(result.compile)
    assert "BREACH" not in told, told
    assert world.secret not in told
    assert all(world.secret.encode() not in content for content in result.files.values())
    assert (
        len(result.stdout.encode()) <= 3 * attack.limits.output_bytes + 100
    )  # an undecodable byte is replaced by three
    ending = result.status.value
    if result.status is RunStatus.FINISHED and result.return_code < 0:
        ending = "killed_by_itself"
    assert ending in (attack.expected or ("finished",)), result
    if not attack.expected:
        assert result.stdout.endswith("end\n"), result
        assert result.return_code == 0, result


def judge_session(world, attack):
    result, after = world.run_session(attack)
    for cell in filter(None, (result, after)):
        assert isinstance(cell, CellResult)
        assert world.secret not in cell.stdout + cell.stderr + str(cell.text) + str(cell.error)
        assert "BREACH" not in cell.stdout + cell.stderr
        assert cell.text is None or isinstance(cell.text, str)
        assert all(image.startswith(b"\x89PNG") and len(image) <= MAX_IMAGE_BYTES for image in cell.images)
        assert cell.error is None or all(len(part) <= MAX_TRACEBACK for part in vars(cell.error).values())
    assert result.session_alive or result.status is not None
