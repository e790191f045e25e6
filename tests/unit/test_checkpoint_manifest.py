"""Manifests and the folders of checkpoints: what is whole is found, what is not is refused with its file."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.checkpoints import halves_of, manifest_of, part_of, save, small_spec
from uneven.checkpoint.folder import find_checkpoints, make_draft, newest, open_checkpoint, prune, publish
from uneven.checkpoint.manifest import Manifest, Slice
from uneven.errors import CheckpointError, CheckpointRefused, InputError

STRUCTURE = small_spec().structure
NAME = "model.layers.0.mlp.down_proj.weight"


def steps(run: Path) -> list[int]:
    return [each.manifest.step for each in find_checkpoints(run)]


# Manifests


def test_a_manifest_comes_back_from_json() -> None:
    manifest = manifest_of(STRUCTURE, extra={"order": {2: "b", 10: "a"}})
    again = Manifest.loads(manifest.dumps(), where="file")
    assert again == replace(manifest, extra={"order": {"2": "b", "10": "a"}})
    assert json.loads(manifest.dumps())["fingerprint"] == STRUCTURE.fingerprint()


def test_a_changed_byte_of_a_manifest_is_found() -> None:
    text = manifest_of(STRUCTURE).dumps()
    chance = random.Random(0)
    for place in (*chance.sample(range(len(text)), 150), 0, len(text) - 1):
        other = chance.choice([c for c in "0123456789abcdefgh ,:" if c != text[place]])
        changed = text[:place] + other + text[place + 1 :]
        with pytest.raises(CheckpointRefused, match=r"^m\.json: "):
            Manifest.loads(changed, where="m.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: s.remove(s[5]),
            r"32 to 64 of .*embed_tokens.* \(exp_avg_sq\), which has 64, are in none of its files",
        ),
        (lambda s: s.append(s[5]), "are in its files more than once"),
        (lambda s: s.__setitem__(0, replace(s[0], stop=s[0].stop + 1)), "32 to 33 of .* in its files more than once"),
        (lambda s: s.__setitem__(1, replace(s[1], start=s[1].start + 1)), "32 to 33 of .* in none"),
        (lambda s: s.__setitem__(1, replace(s[1], stop=s[1].stop + 1)), "64 to 65 of .* beyond its end"),
        (lambda s: s.__setitem__(0, replace(s[0], start=-1)), "-1 to 0 of .*"),
        (lambda s: s.__setitem__(1, replace(s[1], stop=s[1].start - 1)), "31 to 64 of .* in none"),
        (lambda s: s.append(Slice("foreign.weight", "value", 0, 4)), r"hold foreign\.weight \(value\)"),
        (lambda s: s.append(Slice(NAME, "momentum", 0, 4)), r"down_proj.*\(momentum\)"),
    ],
)
def test_gaps_overlaps_and_strangers_are_named(change, message: str) -> None:
    slices = halves_of(STRUCTURE)
    change(slices)
    with pytest.raises(CheckpointError, match=message):
        manifest_of(STRUCTURE, slices=slices)


def test_a_file_lies_in_the_folder_of_its_checkpoint() -> None:
    part = part_of("rank-0.safetensors", halves_of(STRUCTURE)[:2])
    with pytest.raises(CheckpointError, match=r"name of a file in the checkpoint's folder, found '\.\./rank-0'"):
        replace(part, file="../rank-0")


def test_another_model_is_refused_with_the_first_parameter_that_differs(tmp_path: Path) -> None:
    manifest = manifest_of(STRUCTURE)
    manifest.check_model(small_spec().structure, where=tmp_path)
    for other, message in (
        (
            small_spec(vocab_size=65),
            r"embed_tokens\.weight is of shape \[64, 32\] .* there, of shape \[65, 32\] divided along dim 0 in the job",
        ),
        (small_spec(num_hidden_layers=2), r"model\.layers\.1\..* is absent there, of shape .* in the job"),
        (small_spec(tie_word_embeddings=True), r"lm_head\.weight is of shape .* there, absent in the job"),
    ):
        with pytest.raises(CheckpointRefused, match=message):
            manifest.check_model(other.structure, where=tmp_path)


# Folders


def test_checkpoints_are_found_by_step_and_drafts_are_not(tmp_path: Path) -> None:
    assert find_checkpoints(tmp_path) == []
    for step in (40, 100, 20):
        save(tmp_path, manifest_of(STRUCTURE, step=step))
    make_draft(tmp_path, 200, tag="dead")
    (tmp_path / "checkpoints" / "notes.txt").write_text("mine")
    assert steps(tmp_path) == [20, 40, 100]
    assert newest(tmp_path).folder.name == "step-00000100"
    assert newest(tmp_path, step=40).manifest.tokens == 40_000
    assert isinstance(newest(tmp_path).manifest.extra["data"]["sample"], int)


def test_a_step_that_is_written_again_takes_the_place_of_the_first(tmp_path: Path) -> None:
    save(tmp_path, manifest_of(STRUCTURE))
    again = save(tmp_path, manifest_of(STRUCTURE, tokens=5))
    third = save(tmp_path, manifest_of(STRUCTURE, tokens=6))
    assert (again.name, third.name) == ("step-00000060.1", "step-00000060.2")
    assert [each.manifest.tokens for each in find_checkpoints(tmp_path)] == [6]
    assert newest(tmp_path, step=60).manifest.tokens == 6
    (third / "rank-0.safetensors").unlink()
    assert newest(tmp_path).manifest.tokens == 5
    prune(tmp_path, keep=3)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [again.name, third.name]


def damage_truncate(folder: Path) -> str:
    file = folder / "rank-1.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    return r"rank-1\.safetensors: has [\d,]+ bytes, its manifest says [\d,]+"


def damage_remove(folder: Path) -> str:
    (folder / "rank-0.safetensors").unlink()
    return r"rank-0\.safetensors: can't read the checkpoint: No such file"


def damage_no_manifest(folder: Path) -> str:
    (folder / "manifest.json").unlink()
    return r"manifest\.json: can't read the checkpoint: No such file"


def damage_half_manifest(folder: Path) -> str:
    file = folder / "manifest.json"
    file.write_text(file.read_text()[:1000])
    return r"manifest\.json: not JSON"


def damage_bytes(folder: Path) -> str:
    (folder / "manifest.json").write_bytes(b"\xff\xfe")
    return r"manifest\.json: not JSON"


def damage_version(folder: Path) -> str:
    file = folder / "manifest.json"
    file.write_text(file.read_text().replace("checkpoint/1", "checkpoint/9"))
    return r"manifest\.json: expected format 'uneven\.checkpoint/1', found 'uneven\.checkpoint/9'"


def damage_other_json(folder: Path) -> str:
    (folder / "manifest.json").write_text("[]")
    return r"manifest\.json: expected format .*, found 'list'"


def damage_step(folder: Path) -> str:
    file = folder / "manifest.json"
    file.write_text(file.read_text().replace('"seed": 3', '"seed": 4'))
    return r"manifest\.json: its digest is .*; it is damaged"


DAMAGES = [each for name, each in list(globals().items()) if name.startswith("damage_")]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_with_its_file_and_the_one_before_it_used(tmp_path: Path, damage) -> None:
    save(tmp_path, manifest_of(STRUCTURE, step=50))
    message = damage(save(tmp_path, manifest_of(STRUCTURE)))
    with pytest.raises(CheckpointRefused, match=rf"{tmp_path}/checkpoints/step-00000060/{message}"):
        open_checkpoint(tmp_path / "checkpoints" / "step-00000060")
    with pytest.raises(InputError, match=f"no checkpoint of step 60 can be used: .*{message}"):
        newest(tmp_path, step=60)
    assert newest(tmp_path).manifest.step == 50
    assert steps(tmp_path) == [50]
    prune(tmp_path, keep=1)
    assert (tmp_path / "checkpoints" / "step-00000060").is_dir()


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointRefused, match=r"checkpoints: no checkpoint can be used: there is none$"):
        newest(tmp_path)
    save(tmp_path, manifest_of(STRUCTURE))
    with pytest.raises(CheckpointRefused, match=r"no checkpoint of step 7 can be used: there is step-00000060$"):
        newest(tmp_path, step=7)


def test_a_draft_without_its_files_does_not_become_a_checkpoint(tmp_path: Path) -> None:
    draft = make_draft(tmp_path, 60, tag="t")
    with pytest.raises(CheckpointError, match=r"rank-0\.safetensors: can't write the checkpoint: No such file"):
        publish(draft, manifest_of(STRUCTURE))
    assert steps(tmp_path) == []


@pytest.mark.parametrize(
    ("keep", "every", "left"),
    [
        (3, None, [80, 90, 100]),
        (1, None, [100]),
        (0, None, [100]),
        (99, None, list(range(10, 101, 10))),
        (2, 3000.0, [20, 50, 80, 90, 100]),
        (1, 1e9, [100]),
    ],
)
def test_checkpoints_are_kept_by_count_and_by_time(tmp_path: Path, keep: int, every: float | None, left) -> None:
    for step in range(10, 101, 10):  # one every 1,000 s
        save(tmp_path, manifest_of(STRUCTURE, step=step))
        prune(tmp_path, keep=keep, keep_every_s=every)
    assert steps(tmp_path) == left
    assert len(list((tmp_path / "checkpoints").iterdir())) == len(left)


def test_drafts_of_dead_writers_go_and_that_of_the_live_one_stays(tmp_path: Path) -> None:
    save(tmp_path, manifest_of(STRUCTURE))
    (make_draft(tmp_path, 70, tag="dead") / "rank-0.safetensors").write_bytes(b"half")
    live = make_draft(tmp_path, 80, tag="live")
    prune(tmp_path, keep=1, active=live)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [live.name, "step-00000060"]
