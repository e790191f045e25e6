"""Finding the documents of a corpus: real files, real globs, the real standard library."""

import os
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uneven.data import Corpus, Document, corpus, find_files, read_corpus
from uneven.errors import DataError


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_folder_stands_for_its_visible_files_at_any_depth(tmp_path: Path) -> None:
    seen = [write(tmp_path / "a.txt", "a"), write(tmp_path / "deep/er/b.md", "b")]
    write(tmp_path / ".hidden", "c")
    write(tmp_path / ".git/config", "d")
    assert find_files([str(tmp_path)]) == seen


def test_hidden_folder_can_be_named_itself(tmp_path: Path) -> None:
    path = write(tmp_path / ".notes/a.txt", "a")
    assert find_files([str(tmp_path / ".notes")]) == [path]


def test_glob_finds_files_at_any_depth_and_no_folders(tmp_path: Path) -> None:
    seen = [write(tmp_path / "a.py", "a"), write(tmp_path / "x/y/b.py", "b")]
    write(tmp_path / "x/c.txt", "c")
    (tmp_path / "folder.py").mkdir()
    assert find_files([str(tmp_path / "**" / "*.py")]) == seen


def test_existing_file_is_not_read_as_a_glob(tmp_path: Path) -> None:
    path = write(tmp_path / "[ab].txt", "a")
    write(tmp_path / "a.txt", "b")
    assert find_files([str(path)]) == [path]


def test_file_found_twice_is_listed_once_where_first_found(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.txt", "a"), write(tmp_path / "b.txt", "b")
    assert find_files([str(b), str(tmp_path)]) == [b, a]


def test_relative_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.txt", "a")
    monkeypatch.chdir(tmp_path)
    assert find_files(["a.txt"]) == find_files(["."]) == find_files(["*.txt"]) == [path]


def test_no_paths_stand_for_the_standard_library_without_tests_and_packages() -> None:
    library = Path(sysconfig.get_paths()["stdlib"])
    names = {path.relative_to(library) for path in find_files([])}
    assert {Path("json/decoder.py"), Path("os.py")} <= names
    left_out = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
    assert not [name for name in names if name.suffix != ".py" or left_out & set(name.parts)]


def test_standard_library_makes_a_corpus_of_megabytes() -> None:
    found = read_corpus([])
    assert found.num_bytes > 5_000_000
    assert "standard library of Python 3." in found.description


def test_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'.*nowhere' doesn't exist .*needed is a file, a folder or a glob"):
        find_files([str(tmp_path / "nowhere")])


def test_glob_and_folder_without_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"glob '.*\*\.rst' stands for 0 files; needed is at least 1"):
        find_files([str(tmp_path / "*.rst")])
    with pytest.raises(DataError, match=r"folder '.*empty' stands for 0 files"):
        find_files([str(tmp_path / "empty")])


def test_pipe_is_neither_file_nor_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match=r"pipe' is neither a file nor a folder"):
        find_files([str(tmp_path / "pipe")])


def test_one_string_instead_of_a_list_is_refused() -> None:
    with pytest.raises(DataError, match=r"one string, '/'; needed is a list of strings"):
        find_files("/")


def test_named_file_that_is_not_utf8_is_refused_with_its_byte_offset(tmp_path: Path) -> None:
    path = write(tmp_path / "latin.txt", b"caf\xe9 noir")
    with pytest.raises(DataError, match=r"latin\.txt is not UTF-8 text: byte 0xe9 at byte offset 3"):
        read_corpus([str(path)])


def test_named_file_with_a_nul_byte_is_refused_with_its_byte_offset(tmp_path: Path) -> None:
    path = write(tmp_path / "zeros", b"ab\0")
    with pytest.raises(DataError, match=r"zeros is not text: NUL byte at byte offset 2"):
        read_corpus([str(path)])


@pytest.mark.parametrize("chunk_bytes", [1, 2, 3, 5, 100])
@pytest.mark.parametrize(
    ("content", "offset"), [(b"12\xe2\x82\xac5\xff7", 6), (b"1234\xe2\x82", 4), (b"\xf0\x9f\x98x", 0)]
)
def test_byte_offset_holds_across_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int, content: bytes, offset: int
) -> None:
    monkeypatch.setattr(corpus, "_CHUNK_BYTES", chunk_bytes)
    path = write(tmp_path / "bad.txt", content)
    with pytest.raises(DataError, match=rf"at byte offset {offset} "):
        read_corpus([str(path)])


def test_found_files_that_are_not_text_are_skipped_and_counted(tmp_path: Path) -> None:
    text = write(tmp_path / "a.txt", "text")
    write(tmp_path / "b.bin", b"\xff\xfe")
    write(tmp_path / "c.bin", b"\0\0")
    for entry in (str(tmp_path), str(tmp_path / "*")):
        found = read_corpus([entry])
        assert (found.paths, found.num_skipped) == ((text,), 2)


def test_file_found_and_named_counts_as_named(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "text")
    bad = write(tmp_path / "b.bin", b"\xff")
    for entries in ([str(tmp_path), str(bad)], [str(bad), str(tmp_path)]):
        with pytest.raises(DataError, match=r"b\.bin is not UTF-8"):
            read_corpus(entries)


def test_repeated_and_empty_documents_are_dropped(tmp_path: Path) -> None:
    for name, content in {"a": "same", "b": "same", "c": "other", "d": ""}.items():
        write(tmp_path / name, content)
    found = read_corpus([str(tmp_path)])
    assert (len(found.documents), found.num_bytes, found.num_repeated) == (2, 9, 1)


def test_corpus_without_text_is_refused_with_counts(tmp_path: Path) -> None:
    write(tmp_path / "a", "")
    write(tmp_path / "b", b"\xff")
    with pytest.raises(DataError, match=r"corpus is empty: 0 bytes of text in .* \(1 files skipped"):
        read_corpus([str(tmp_path)])


def test_order_and_fingerprint_depend_on_contents_alone(tmp_path: Path) -> None:
    texts = [f"text {number}" for number in range(20)]
    for number, text in enumerate(texts):
        write(tmp_path / f"one/{number}.txt", text)
        write(tmp_path / f"two/sub/{20 - number}.md", text)
    one, two = read_corpus([str(tmp_path / "one")]), read_corpus([str(tmp_path / "two")])
    assert one.fingerprint == two.fingerprint
    assert [d.read() for d in one.documents] == [d.read() for d in two.documents]
    assert sorted(d.read() for d in one.documents) == sorted(texts)
    write(tmp_path / "two/more.txt", "more")
    assert read_corpus([str(tmp_path / "two")]).fingerprint != one.fingerprint


def test_fingerprint_is_the_same_in_every_version(tmp_path: Path) -> None:
    write(tmp_path / "a", "a\r\n")
    write(tmp_path / "b", "é")
    golden = "347745a498211a9fe3f44aa3a2cc77f027dc701e25f20c3d08ca02c53b721cf3"
    assert read_corpus([str(tmp_path)]).fingerprint == golden


def test_line_ends_are_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "a", "a\r\nb\rc\n")
    assert read_corpus([str(path)]).documents[0].read() == "a\r\nb\rc\n"


def test_document_that_changed_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a", "before")
    document = read_corpus([str(path)]).documents[0]
    write(path, "afterwards")
    with pytest.raises(DataError, match=r"a changed while it was in use: it had 6 bytes .* now it has 10 bytes"):
        document.read()
    path.unlink()
    with pytest.raises(DataError, match=r"can't read the document .*a: No such file"):
        document.read()


def test_description_is_short_whatever_the_number_of_paths(tmp_path: Path) -> None:
    entries = [str(write(tmp_path / f"{number}", f"{number}")) for number in range(10)]
    assert read_corpus(entries).description == f"{', '.join(entries[:3])} and 7 more"
    assert read_corpus(entries[:2]).description == ", ".join(entries[:2])


@given(st.lists(st.sampled_from("abcd"), min_size=2, max_size=5))
def test_corpus_takes_only_distinct_documents_in_order(digests: list[str]) -> None:
    documents = tuple(Document(path=Path(digest), num_bytes=1, digest=digest) for digest in digests)
    if digests == sorted(set(digests)):
        Corpus(documents=documents, num_skipped=0, num_repeated=0, description="")
    else:
        with pytest.raises(DataError, match=r"distinct and in the order of their digests"):
            Corpus(documents=documents, num_skipped=0, num_repeated=0, description="")
