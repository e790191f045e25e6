"""Bad input: exit code 2, one message with the value found, the value needed and where; nothing is written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command import TINY_MODEL, TinyJob, uneven, uneven_here
from tests.gguf_file import write_tiny_gguf
from tests.weight_files import shapes_of, write_shards, write_weights
from uneven.layout import ParallelPlan
from uneven.modelspec import parse_model

Prepare = Callable[[Path], Any]


def write_config(name: str, **changes: Any) -> Prepare:
    def prepare(folder: Path) -> None:
        (folder / name).write_text(json.dumps(TINY_MODEL | changes))

    return prepare


def write_plan(folder: Path) -> None:
    other = parse_model(TINY_MODEL | {"intermediate_size": 64})
    (folder / "other.json").write_text(ParallelPlan.from_shares(other.structure, [[1, 1], [1]]).dumps())


def write_text(name: str, text: str) -> Prepare:
    def prepare(folder: Path) -> None:
        (folder / name).write_text(text)

    return prepare


def make_folder(name: str) -> Prepare:
    return lambda folder: (folder / name).mkdir()


def write_tokenizer(folder: Path) -> None:
    vocab = {f"w{n}": n for n in range(500)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"}
    (folder / "big.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))


def write_model(change: Prepare, *, shards: bool = False, **config: Any) -> Prepare:
    """A folder `m` with a configuration and sound weights of the tiny model; then `change` is done to it."""

    def prepare(folder: Path) -> None:
        (folder / "m").mkdir()
        write_config("m/config.json", **config)(folder)
        shapes = shapes_of(parse_model(TINY_MODEL))
        if shards:
            write_shards(folder / "m", shapes)
        else:
            write_weights(folder / "m/model.safetensors", shapes)
        change(folder / "m")

    return prepare


def cut(name: str, length: int) -> Prepare:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:length])


def rewrite(dtype: str) -> Prepare:
    """The same weights in other numbers."""
    return lambda folder: write_weights(
        folder / "model.safetensors", shapes_of(parse_model(TINY_MODEL)), dtypes={"model.norm.weight": dtype}
    )


def reindex(place: str) -> Prepare:
    def change(folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        listing = json.loads(index.read_text())
        listing["weight_map"]["model.norm.weight"] = place
        index.write_text(json.dumps(listing))

    return change


def write_adapter(folder: Path) -> None:
    (folder / "a").mkdir()
    (folder / "a/adapter_config.json").write_text("{}")
    write_weights(folder / "a/adapter_model.safetensors", {"base_model.q_proj.lora_A.weight": (4, 8)})


def write_gguf(kind: str) -> Prepare:
    """A GGUF: whole but of an unknown kind, cut short, or whole with a tensor that transformers passes over."""

    def prepare(folder: Path) -> None:
        file = folder / "m.gguf"
        write_tiny_gguf(
            file, architecture="wavenet" if kind == "unknown" else "llama", has_scaled_rope=kind == "scaled"
        )
        if kind.isdigit():
            file.write_bytes(file.read_bytes()[: int(kind)])

    return prepare


def nothing(_: Path) -> None:
    pass


CASES: dict[str, tuple[Prepare, list[str], list[str]]] = {
    "unknown key": (nothing, ["--set", "train.step=3"], ["--set train.step=3", "'train.step'", "'train.steps'"]),
    "unknown key in a file": (write_text("c.toml", "[train]\nsed = 1"), ["c.toml"], ["c.toml", "train.sed", "'seed'"]),
    "not TOML": (write_text("c.toml", "[train"), ["c.toml"], ["c.toml", "not TOML"]),
    "missing file": (nothing, ["c.toml"], ["c.toml", "nothing"]),
    "wrong type": (nothing, ["--set", "train.steps=many"], ["train.steps", "integer", "'many'"]),
    "wrong precision": (nothing, ["--set", "train.precision=fp8"], ["train.precision", "'bf16'", "'fp8'"]),
    "copies that are no number": (
        nothing,
        ["--set", "train.optimizer_copies=0"],
        ["train.optimizer_copies", "at least 1, or 'all'", "found 0"],
    ),
    "no equals sign": (nothing, ["--set", "train.steps"], ["--set train.steps", "key=value"]),
    "shares for other replicas": (
        nothing,
        ["--replicas", "4,3", "--shares", "1:1,1:1"],
        ["[2, 2] devices", "[4, 3]"],
    ),
    "zero share": (nothing, ["--shares", "2:0,1"], ["2:0,1", "replica 0", "share 0", "positive"]),
    "negative share": (nothing, ["--shares", "1,1:-3"], ["replica 1", "share -3", "positive"]),
    "infinite share": (nothing, ["--shares", "1,inf"], ["replica 1", "inf", "positive"]),
    "share that is no number": (nothing, ["--shares", "1,a"], ["--shares 1,a", "numbers"]),
    "zero devices": (nothing, ["--replicas", "2,0"], ["--replicas 2,0", "at least 1"]),
    "a share too small for a unit": (nothing, ["--shares", "1e-9:1,1"], ["replica 0", "1e-09", "device 0 no unit"]),
    "a degree beyond any machine": (nothing, ["--replicas", "9999999999999"], ["parallel.replicas.0", "65536"]),
    "a key below a value": (nothing, ["--set", "train.steps.x=1"], ["--set train.steps.x=1", "'train.steps'", "value"]),
    "a timeout below a second": (nothing, ["--set", "launch.timeout_s=1e-9"], ["launch.timeout_s", "equal to 1"]),
    "NCCL on the CPU": (nothing, ["--set", "launch.backend=nccl"], ["launch.backend", "'nccl'", "'cuda'", "'cpu'"]),
    "too many threads": (nothing, ["--set", "launch.threads=1000000000"], ["launch.threads", "1024"]),
    "a seed beyond 64 bits": (nothing, ["--set", f"seed={2**63}"], ["seed", "less than", str(2**63)]),
    "a tiny temperature": (nothing, ["--set", "sample.temperature=1e-320"], ["sample.temperature", "0.001"]),
    "a prompt that is no text": (nothing, ["--set", "sample.prompt=\udcff"], ["sample.prompt", "surrogate"]),
    "a cache in nobody's home": (nothing, ["--set", "data.cache=~nosuchuser/x"], ["data.cache", "~nosuchuser"]),
    "a name that is too long": (nothing, ["--set", f"model={'n' * 300}"], ["nnn", "too long"]),
    "rope_theta below 0": (
        write_config("r.json", rope_theta=-1),
        ["--set", "model=r.json"],
        ["r.json", "rope_theta", "-1", "above 0"],
    ),
    "replicas that are no numbers": (nothing, ["--replicas", "2+1"], ["--replicas 2+1", "4,3"]),
    "more devices than units": (nothing, ["--replicas", "99"], ["99 devices", "88 of mlp", "5 of heads"]),
    "a replica without samples": (nothing, ["--batch-shares", "100:1"], ["replica 1", "1 of 101", "global_batch is 7"]),
    "batch shares for other replicas": (nothing, ["--batch-shares", "1:1:1"], ["3 batch shares", "2 replicas"]),
    "a plan for another model": (
        write_plan,
        ["--plan", "other.json"],
        ["other.json", "gate_proj", "(64, 40)", "(88, 40)"],
    ),
    "a plan that is no JSON": (write_text("p.json", "{"), ["--plan", "p.json"], ["p.json", "not JSON"]),
    "a plan that is another JSON": (
        write_text("p.json", "{}"),
        ["--plan", "p.json"],
        ["p.json", "uneven.plan/1", "None"],
    ),
    "a plan that is missing": (nothing, ["--plan", "p.json"], ["p.json", "No such file"]),
    "a plan and replicas": (write_plan, ["--plan", "other.json", "--replicas", "2,1"], ["parallel.replicas", "plan"]),
    "a large tokenizer": (write_tokenizer, ["--set", "tokenizer=big.json"], ["big.json", "500", "300"]),
    "a missing tokenizer": (nothing, ["--set", "tokenizer=none.json"], ["none.json"]),
    "an empty corpus": (write_text("e.txt", ""), ["--set", "data.paths=['e.txt']"], ["e.txt"]),
    "an empty folder": (make_folder("empty"), ["--set", "data.paths=['empty']"], ["empty"]),
    "a missing corpus": (nothing, ["--set", "data.paths=['gone.txt']"], ["gone.txt"]),
    "a glob without match": (nothing, ["--set", "data.paths=['*.md']"], ["*.md"]),
    "a record that is no JSON": (
        write_text("r.jsonl", '{"text": "fine"}\n{"text": \n'),
        ["--set", "data.paths=r.jsonl"],
        ["r.jsonl, line 2", "not valid JSON"],
    ),
    "a record without content": (
        write_text("r.jsonl", '{"prompt": "a"}\n'),
        ["--set", "data.paths=r.jsonl"],
        ["r.jsonl, line 1", "'text'", "'messages'", "['prompt']"],
    ),
    "a conversation without an answer": (
        write_text("r.jsonl", '{"messages": [{"role": "user", "content": "a"}]}\n'),
        ["--set", "data.paths=r.jsonl"],
        ["r.jsonl, line 1", "'assistant'", "['user']"],
    ),
    "a tokenizer without a chat template": (
        write_text("r.jsonl", '{"messages": [{"role": "assistant", "content": "a"}]}\n'),
        ["--set", "data.paths=r.jsonl"],
        ["r.jsonl, line 1", "'byte'", "chat_template.jinja"],
    ),
    "a small corpus": (
        write_text("s.txt", "abc " * 50),
        ["--set", "data.paths=['s.txt']"],
        ["training sequences", "train.global_batch = 7"],
    ),
    "a long sequence": (nothing, ["--set", "train.seq_len=129"], ["129", "128", "max_position_embeddings"]),
    "an existing folder": (make_folder("run"), [], ["run", "exists"]),
    "an unsupported family": (
        write_config("gpt2.json", model_type="gpt2"),
        ["--set", "model=gpt2.json"],
        ["gpt2.json", "'gpt2'", "not understood", "llama, mistral, qwen2, qwen3"],
    ),
    "no family": (write_config("n.json", model_type=None), ["--set", "model=n.json"], ["n.json", "not understood"]),
    "a missing model": (nothing, ["--set", "model=gone"], ["gone", "config.json"]),
    "weights of another format": (
        lambda folder: (
            make_folder("m")(folder),
            write_config("m/config.json")(folder),
            write_text("m/a.bin", "")(folder),
        ),
        ["--set", "model=m"],
        ["m: expected weights in model.safetensors", "a.bin"],
    ),
    "weights that are cut short": (
        write_model(cut("model.safetensors", 60_000)),
        ["--model", "m"],
        ["m/model.safetensors", "60,000 bytes", "describes", "damaged"],
    ),
    "a header that is cut short": (
        write_model(cut("model.safetensors", 100)),
        ["--model", "m"],
        ["m/model.safetensors", "header", "damaged"],
    ),
    "an absent shard": (
        write_model(lambda folder: (folder / "model-1.safetensors").unlink(), shards=True),
        ["--model", "m"],
        ["m/model-1.safetensors", "No such file"],
    ),
    "a shard outside of the folder": (
        write_model(reindex("../x.safetensors"), shards=True),
        ["--model", "m"],
        ["m/model.safetensors.index.json", "same folder", "'../x.safetensors'"],
    ),
    "an index that errs": (
        write_model(reindex("model-0.safetensors"), shards=True),
        ["--model", "m"],
        ["m/model.safetensors.index.json", "model.norm.weight in model-0.safetensors"],
    ),
    "weights of a larger model": (
        write_model(nothing, num_hidden_layers=1),
        ["--model", "m"],
        ["m/model.safetensors", "hold model.layers.1.self_attn.q_proj.weight and 8 more tensors", "model lacks"],
    ),
    "weights of a smaller model": (
        write_model(nothing, num_hidden_layers=3),
        ["--model", "m"],
        ["m/model.safetensors", "needs model.layers.2.self_attn.q_proj.weight and 8 more tensors", "files lack"],
    ),
    "weights of another width": (
        write_model(nothing, intermediate_size=96),
        ["--model", "m"],
        ["m/model.safetensors", "model.layers.0.mlp.gate_proj.weight", "(88, 40)", "(96, 40)"],
    ),
    "weights of 8 bits": (
        write_model(rewrite("F8_E4M3")),
        ["--model", "m"],
        ["m/model.safetensors", "model.norm.weight has dtype F8_E4M3", "BF16"],
    ),
    "experts of a model without any": (
        write_model(nothing),
        ["--model", "m", "--set", "parallel.experts=whole"],
        ["parallel.experts is 'whole'", "a llama model has no experts"],
    ),
    "an adapter": (write_adapter, ["--model", "a"], ["a holds an adapter", "merge"]),
    "no GGUF": (write_text("m.gguf", "GGML"), ["--model", "m.gguf"], ["m.gguf", "b'GGML'", "b'GGUF'"]),
    "a missing GGUF": (nothing, ["--model", "m.gguf"], ["m.gguf", "No such file"]),
    "a GGUF of an unknown kind": (write_gguf("unknown"), ["--model", "m.gguf"], ["m.gguf", "wavenet"]),
    "a GGUF without its end": (write_gguf("3000"), ["--model", "m.gguf"], ["m.gguf", "can't read this GGUF"]),
    "a GGUF without its header": (write_gguf("20"), ["--model", "m.gguf"], ["m.gguf", "can't read this GGUF"]),
    "a GGUF that is read in part": (
        write_gguf("scaled"),
        ["--model", "m.gguf"],
        ["m.gguf", "transformers reads", "scaled rotary"],
    ),
    "attention dropout": (
        write_config("d.json", attention_dropout=0.1),
        ["--set", "model=d.json"],
        ["d.json", "attention_dropout", "0.1"],
    ),
    "heads that do not group": (
        write_config("h.json", num_key_value_heads=2),
        ["--set", "model=h.json"],
        ["num_attention_heads 5", "num_key_value_heads 2"],
    ),
    "a size that is no number": (
        write_config("s.json", hidden_size="big"),
        ["--set", "model=s.json"],
        ["s.json", "hidden_size", "'big'"],
    ),
    "no GPU": (nothing, ["--device", "cuda"], ["cuda", "0 GPUs", "3 devices"]),
    "an unknown device": (nothing, ["--device", "tpu"], ["device", "'cpu' or 'cuda'", "'tpu'"]),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_refused_by_name_and_nothing_is_written(tiny: TinyJob, name: str) -> None:
    prepare, arguments, words = CASES[name]
    prepare(tiny.folder)
    before = sorted(tiny.folder.rglob("*"))
    result = uneven_here("train", *tiny.settings(), *arguments, "--out", "run", cwd=tiny.folder)
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr
    assert sorted(tiny.folder.rglob("*")) == before


def test_a_mistake_is_one_message_and_code_2_in_a_shell_too(tiny: TinyJob) -> None:
    result = uneven("train", "--shares", "0", cwd=tiny.folder)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: --shares 0: replica 0 has share 0; shares must be positive numbers\n"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 44}, ["hidden size (44)", "(5)"]),
        ({"hidden_act": "wavy"}, ["wavy"]),
        ({"rms_norm_eps": "small"}, ["rms_norm_eps", "small"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["factor"]),
    ],
)
def test_a_configuration_that_transformers_refuses_leaves_no_folder(
    tiny: TinyJob, change: dict[str, Any], words: list[str]
) -> None:
    write_config("odd.json", **change)(tiny.folder)
    result = tiny.train(model="odd.json")
    assert result.returncode == 2
    assert result.stderr.startswith("error: transformers refuses this llama configuration: ")
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr
    assert not (tiny.folder / "run").exists()


def test_a_folder_below_a_file_is_refused_before_anything_else(tiny: TinyJob) -> None:
    (tiny.folder / "file").write_text("")
    result = tiny.train(out="file/run")
    assert result.returncode == 2
    assert result.stderr.endswith("is no folder\n")


def test_an_unknown_flag_is_code_2(tiny: TinyJob) -> None:
    result = uneven_here("train", "--replica", "2", cwd=tiny.folder)
    assert result.returncode == 2
    assert "--replica" in result.stderr


@pytest.mark.parametrize("arguments", [["gone.json"], ["."]])
def test_plan_show_refuses_what_is_no_plan(tiny: TinyJob, arguments: list[str]) -> None:
    result = uneven_here("plan", "show", *arguments, cwd=tiny.folder)
    assert result.returncode == 2
    assert arguments[0] in result.stderr
    assert "Traceback" not in result.stderr
