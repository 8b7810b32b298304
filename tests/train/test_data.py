"""What a run reads: every document once, every sample once a pass, the same order for any number of ranks, and one clear line for what is wrong."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.errors import SpecError
from trainwright.spec.job import TrainingJob
from trainwright.train.data.samples import IGNORED, Cut, Packed, pack, pieces, samples_of
from trainwright.train.data.shuffle import shuffled
from trainwright.train.data.sources import EMBEDDED, documents, embedded_text
from trainwright.train.data.tokenizer import ByteTokenizer, load_tokenizer
from trainwright.train.data.tokens import Tokens, open_tokens, prepare

SPEECHES = ["O Romeo, Romeo!", "Wherefore art thou Romeo?", "Deny thy father", "and refuse thy name;", "x"]


def tokens_of(texts: list[str], folder: Path) -> Tokens:
    source = folder / "speeches.jsonl"
    source.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return open_tokens(prepare(str(source), None, 257, folder / "cache"), 257)


def stream(values: list[int] | np.ndarray, end: int | None = None) -> Tokens:
    return Tokens("memory", np.asarray(values, np.uint16), None, end, "d")


# --- the order


@given(st.integers(1, 3000), st.integers(0, 2**63), st.integers(0, 5))
def test_the_order_is_a_permutation_of_any_size(n: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(shuffled(np.arange(n), n, seed, epoch)), np.arange(n))


def test_any_place_of_a_huge_order_is_known_alone_and_seeds_and_epochs_differ() -> None:
    n = 10**12
    whole = shuffled(np.arange(1000), n, seed=7, epoch=0)
    assert np.array_equal(shuffled(np.array([999, 3]), n, 7, 0), whole[[999, 3]])
    assert len({tuple(shuffled(np.arange(8), 1000, seed, epoch)) for seed in range(4) for epoch in range(4)}) == 16


def test_the_order_looks_random() -> None:
    """Neighbours are uncorrelated and the first half of the places does not prefer a half of the items (5 sigma)."""
    n = 40_000
    order = shuffled(np.arange(n), n, 0, 0).astype(float)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 5 / n**0.5
    assert abs((order[: n // 2] < n / 2).mean() - 0.5) < 5 * 0.5 / (n / 2) ** 0.5


# --- sources


def test_the_embedded_text_is_a_play() -> None:
    text = embedded_text()
    assert text.startswith("SAMPSON:")
    assert text.rstrip().endswith("Than this of Juliet and her Romeo.")
    assert len(text) > 130_000
    assert list(documents(EMBEDDED)) == [text]


def test_folders_globs_and_compressed_lines_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.md").write_text("one")
    (tmp_path / "notes.pdf").write_bytes(b"%PDF")
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as f:
        f.write('{"text": "three"}\n\n"four"\n{"text": "  "}\n')
    assert list(documents(str(tmp_path))) == ["one", "two", "three", "four"]
    assert list(documents(str(tmp_path / "*.txt"))) == ["two"]


WRONG = {
    "missing.txt": (None, "there is no such file or folder"),
    "latin.txt": (b"caf\xe9", r"is not text \(UTF-8\) at byte 3"),
    "broken.jsonl": (b'{"text": "a"}\n{"text": \n', "broken.jsonl, line 2: is no JSON"),
    "field.jsonl": (b'{"txt": "a"}\n', r"has no text under 'text' \(nearest: txt\)"),
    "empty.txt": (b" \n", "holds no text"),
    "cut.jsonl.gz": (gzip.compress(b'{"text": "aaaa"}' * 99)[:30], "cannot be read"),
    "odd.bin": (b"\x01\x00\x02", "no whole number of uint16"),
    "none.bin": (b"", "holds no token"),
    "large.bin": (np.array([1, 2, 999], "<u2").tobytes(), "token 2 is 999, the model's vocabulary ends at 256"),
    "short.bin": (np.array([20240520, 1, 5], "<i4").tobytes().ljust(1024, b"\0") + b"\1\0" * 4, "truncated: 4 of 5"),
    "array.npy": (b"\x93NUMPY\x01\x00", "is no array of numbers"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_a_source_is_one_line(name: str, tmp_path: Path) -> None:
    content, says = WRONG[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SpecError, match=says) as refused:
        prepare(str(tmp_path / name), None, 257, tmp_path / "cache")
    assert "\n" not in str(refused.value)
    assert name in str(refused.value)


def test_arrays_that_would_run_code_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "o.npy", np.array([print], object), allow_pickle=True)
    with pytest.raises(SpecError, match="is no array of numbers"):
        prepare(str(tmp_path / "o.npy"), None, 257, tmp_path)
    np.save(tmp_path / "f.npy", np.zeros((2, 2)))
    with pytest.raises(SpecError, match="one row of integers"):
        prepare(str(tmp_path / "f.npy"), None, 257, tmp_path)


# --- tokenizers and token files


def test_bytes_come_back_as_text_and_small_vocabularies_are_refused() -> None:
    coder = ByteTokenizer(257)
    assert coder.decode([*coder.encode(["Größe"])[0].tolist(), 256]) == "Größe"
    assert (ByteTokenizer(256).end, ByteTokenizer(50257).end) == (0, 256)
    with pytest.raises(SpecError, match="holds no bytes"):
        load_tokenizer(None, 255)


def test_a_tokenizer_file_is_read_and_one_of_another_model_refused(tmp_path: Path) -> None:
    library = pytest.importorskip("tokenizers")
    inner = library.Tokenizer(library.models.WordLevel({"O": 0, "Romeo": 1, "[UNK]": 2, "</s>": 3}, unk_token="[UNK]"))
    inner.pre_tokenizer = library.pre_tokenizers.Whitespace()
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "t.txt").write_text("O Romeo Juliet")
    found = open_tokens(prepare(str(tmp_path / "t.txt"), str(tmp_path), 4, tmp_path / "cache"), 4)
    assert found.values.tolist() == [0, 1, 2, 3]
    assert found.end == 3
    with pytest.raises(SpecError, match="has 4 tokens, the model's vocabulary 3"):
        prepare(str(tmp_path / "t.txt"), str(tmp_path), 3, tmp_path / "cache")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(SpecError, match=r"is no tokenizer\.json"):
        load_tokenizer(str(tmp_path), 4)


def test_a_token_file_is_made_once_and_made_again_when_the_text_changes_or_it_is_damaged(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("abc")
    first = prepare(str(text), None, 257, tmp_path / "cache")
    stamp = first.stat().st_mtime_ns
    assert prepare(str(text), None, 257, tmp_path / "cache") == first
    assert first.stat().st_mtime_ns == stamp
    first.write_bytes(b"\0\0")
    assert open_tokens(prepare(str(text), None, 257, tmp_path / "cache"), 257).values.tolist() == [97, 98, 99, 256]
    text.write_text("abcd")
    assert prepare(str(text), None, 257, tmp_path / "cache") != first
    assert not list((tmp_path / "cache").glob("*.tmp"))


def test_other_programs_token_files_are_mapped(tmp_path: Path) -> None:
    values = np.array([5, 6, 7], "<u2")
    values.tofile(tmp_path / "nano.bin")
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 3
    (tmp_path / "llmc.bin").write_bytes(header.tobytes() + values.tobytes())
    np.save(tmp_path / "n.npy", values.astype(np.int32))
    for name in ("nano.bin", "llmc.bin", "n.npy"):
        path = prepare(str(tmp_path / name), None, 257, tmp_path / "cache")
        assert open_tokens(path, 257).values.tolist() == [5, 6, 7]
        assert path.parent == tmp_path


# --- samples


def test_cut_samples_cover_the_stream_and_labels_are_the_next_tokens() -> None:
    cut = Cut(stream(range(10)), 3)
    assert len(cut) == 3
    rows = [cut.get(i) for i in range(3)]
    assert np.concatenate([r[0] for r in rows]).tolist() == list(range(9))
    assert all(np.array_equal(r[1], r[0] + 1) and r[3] is None for r in rows)
    with pytest.raises(SpecError, match="holds 3 tokens, one sample takes 4"):
        Cut(stream(range(3)), 3)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(2, 16))
def test_packing_keeps_every_piece_once_within_a_sequence(lengths: list[int], size: int) -> None:
    starts, cut = pieces(np.cumsum(lengths), size)
    assert cut.sum() == sum(lengths)
    assert cut.max() <= size
    assert np.array_equal(np.repeat(starts, cut) + np.concatenate([np.arange(c) for c in cut]), np.arange(sum(lengths)))
    order, bounds = pack(cut, size)
    assert np.array_equal(np.sort(order), np.arange(len(cut)))
    fills = [cut[order[a:b]].sum() for a, b in itertools.pairwise(bounds)]
    assert max(fills) <= size
    assert sum(f <= size / 2 for f in fills) <= 1  # best fit leaves at most one bin half empty


def test_packed_documents_do_not_see_or_predict_each_other(tmp_path: Path) -> None:
    tokens = tokens_of(SPEECHES, tmp_path)
    packed = Packed(tokens, 48)
    seen = []
    for i in range(len(packed)):
        row, labels, positions, ids = packed.get(i)
        assert ids is not None
        for number in range(int(ids.max()) + 1):
            mine = np.flatnonzero(ids == number)
            assert np.array_equal(positions[mine], np.arange(len(mine)))
            assert np.array_equal(np.diff(mine), np.ones(len(mine) - 1))
            assert labels[mine[-1]] == IGNORED
            assert np.array_equal(labels[mine[:-1]], row[mine[1:]])
            seen.append(ByteTokenizer().decode(row[mine].tolist()))
        assert (labels[ids == -1] == IGNORED).all()
    assert sorted(seen) == sorted(SPEECHES)
    assert packed.fill == sum(len(s) + 1 for s in SPEECHES) / (48 * len(packed))


def test_without_a_list_of_ends_the_closing_token_says_where_documents_end() -> None:
    assert stream([1, 2, 9, 3, 9, 4], end=9).document_ends().tolist() == [3, 5, 6]
    assert stream([1, 2]).document_ends().tolist() == [2]
    with pytest.raises(SpecError, match="nothing to predict"):
        Packed(stream([9, 9, 9], end=9), 4)


# --- batches

torch = pytest.importorskip("torch")
from trainwright.train.data.batches import Batches, batches_of  # noqa: E402

JOB = TrainingJob(seq_len=8, global_batch_size=6)


def rows(batches: list[Batches]) -> list[list[int]]:
    """The next global step of all replicas, as the first token of each sample."""
    return [int(t) for b in batches for t in next(b).tokens[:, 0]]


def replicas(size: int, job: TrainingJob = JOB, seed: int = 3) -> list[Batches]:
    tokens = stream(np.arange(8 * 20 + 1))
    return [batches_of(tokens, job, 257, seed=seed, rank=r, size=size) for r in range(size)]


def test_every_number_of_replicas_reads_the_same_samples_in_the_same_steps() -> None:
    runs = {size: replicas(size) for size in (1, 2, 3, 6)}
    for _ in range(8):
        steps = {size: rows(batches) for size, batches in runs.items()}
        assert all(step == steps[1] for step in steps.values())


def test_a_pass_reads_each_sample_once_and_the_next_in_another_order() -> None:
    (one,) = replicas(1, TrainingJob(seq_len=8, global_batch_size=10))
    passes = [rows([one]) + rows([one]) for _ in range(3)]
    assert all(sorted(p) == list(range(0, 160, 8)) for p in passes)
    assert len({tuple(p) for p in passes}) == 3


@given(st.integers(0, 9), st.sampled_from([1, 2, 3, 6]), st.sampled_from([1, 2, 3, 6]))
def test_resuming_on_other_ranks_goes_on_with_the_next_sample(steps: int, before: int, after: int) -> None:
    whole, first, second = replicas(1), replicas(before), replicas(after)
    for _ in range(steps):
        assert rows(whole) == rows(first)
    states = [b.state() for b in first]
    assert all(s == states[0] for s in states)
    assert json.loads(json.dumps(states[0])) == states[0]
    for b in second:
        b.load(states[0])
    assert rows(whole) == rows(second)


def test_a_state_of_other_data_is_refused() -> None:
    (one,) = replicas(1)
    for wrong, says in (({"digest": "x"}, "another text, tokenizer"), ({"samples": 4}, "sequence length"), ({"seed": 4}, "another seed")):
        with pytest.raises(SpecError, match=says):
            one.load({**one.state(), **wrong})


def test_a_token_beyond_the_vocabulary_stops_before_a_kernel_reads_past_a_table() -> None:
    samples = samples_of(stream([300] * 20), 8, packing=False)
    with pytest.raises(Exception, match="token 300, the model's vocabulary ends at 256"):
        next(Batches(samples, TrainingJob(seq_len=8, global_batch_size=1), seed=0, digest="d", vocabulary=257))


def test_batches_are_stacked_with_documents_where_samples_are_packed(tmp_path: Path) -> None:
    job = TrainingJob(seq_len=48, global_batch_size=2, packing=True)
    batch = next(batches_of(tokens_of(SPEECHES, tmp_path), job, 257, seed=0))
    assert batch.tokens.shape == batch.labels.shape == batch.positions.shape == (2, 48)
    assert batch.tokens.dtype == torch.int64
    assert batch.documents is not None
    assert batch.documents.shape == (2, 48)
    assert next(replicas(1)[0]).documents is None
