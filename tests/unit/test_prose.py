"""The check of the texts in the code names each text that is hard to read, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import prose
from tests.prose import Text, by_folder, clean
from tests.site import prose as pages

LONG = "The consumer reads " + "the next batch and " * 6 + "stops."
PLAIN = {
    "a.py": '''\
"""Return the next batch, or None if nothing is ready. At most one batch is in flight, and one of two has it."""

WIDTH = 2  # characters, e.g. of a sign
# Who may call this?
log.info("read %s", WIDTH)
raise ValueError(f"{WIDTH} is too wide: make it narrower")
''',
    "b.sql": "-- One row for each worker.\ncomment on table a.b is 'The workers''s rows; "
    "each has a number.';\nselect 'what nobody reads';\n",
}
HARD = {
    '"""What the feed names must be there."""': "headless",
    "# The batch is read. Whoever waits is woken.": "headless",
    "x = 1  # The lock of who is at work": "inside",
    "# Older ones are dropped.": "one",
    f"# {LONG}": "long",
    "# The consumer reads the next batch, and it waits for the lock,\n"
    "# then it writes the rows and the position in one transaction before it reads again.": "long",
    'raise ValueError("the worker is gone, who had it")': "inside",
    'log.warning(f"{x}: another one is there")': "one",
    'add(help="what is read")': "headless",
}
HARD_SQL = {
    "-- What a worker reads.": "headless",
    "comment on table a.b is 'The rows '\n    'of whoever came.';": "inside",
    "create function a.b() as $$ begin\n raise exception using hint = 'use another one'; end $$;": "one",
    f"do $$ begin perform pgchange.refuse('{LONG}', 'no'); end $$;": "long",
}


def of(folder: Path, files: dict[str, str]) -> list[Text]:
    for name, content in files.items():
        (folder / name).write_text(content)
    return [text for found in by_folder(["."], folder).values() for text in found]


def test_plain_texts_have_no_marks(tmp_path):
    found = of(tmp_path, PLAIN)
    assert len(found) == 7
    assert not [str(text) for text in found if text.marks or text.long]
    assert clean(found)


@pytest.mark.parametrize(
    ("name", "code", "fault"),
    [("a.py", code, fault) for code, fault in HARD.items()]
    + [("a.sql", code, fault) for code, fault in HARD_SQL.items()],
)
def test_a_text_of_each_kind_is_named_with_its_place(tmp_path, name, code, fault):
    line = code.count("\n", 0, code.index("raise") if "raise exception" in code else 0) + 3
    faulty = [text for text in of(tmp_path, {name: "\n\n" + code + "\n"}) if text.marks or text.long]
    assert [str(text).startswith(f"{name}:{line}: {fault}: ") for text in faulty] == [True]
    assert clean(faulty) == (fault in ("inside", "one"))


def test_code_in_a_text_counts_as_a_word_and_a_block_of_it_not_at_all():
    code = "``" + "a " * 40 + "``"
    assert Text("a.py", 1, f"The batch is {code} here::\n\n    {'b ' * 40}\n").long == 0


def test_lint_names_the_texts_of_a_clean_folder_that_exceeds_the_limits(monkeypatch, capsys):
    plain, hard = Text("a/b.py", 1, "All is well."), Text("c/d.py", 2, "What is read.")
    monkeypatch.setattr(prose, "by_folder", lambda folders, root: {"a": [plain] * 200 + [hard], "c": [hard]})
    monkeypatch.setattr("sys.argv", ["prose", "--lint"])
    assert prose.main() == 1
    shown = capsys.readouterr().out
    assert "c/d.py:2: headless: What is read." in shown
    assert "\na " not in shown


PAGE = f"""# A heading is no sentence

The consumer reads a [batch](of/it.md), what `a b c` is. {" ".join(["word"] * 31)}.

- One item
- Another item

| a | {" ".join(["cell"] * 26)} |
|---|---|

```sql
select what from nobody;
```
"""


def test_the_prose_of_a_page_is_measured_without_its_code(monkeypatch, tmp_path):
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    (tmp_path / "a.md").write_text(PAGE)
    found = pages.prose(tmp_path / "a.md")
    assert [each.words for each in found.sentences] == [8, 31, 2, 2]
    assert [each.words for each in found.long] == [31]
    assert [each.words for each in found.long_cells] == [26]
    assert round(found.share("what"), 1) == round(1000 / found.words, 1)
    assert not found.is_within_limits()


def test_a_link_to_a_file_outside_of_the_docs_leads_to_its_page_in_the_site():
    """The test is skipped if the packages for the documentation are missing, as in the cells of the matrix."""
    hooks = pytest.importorskip("tests.site.hooks")
    targets = {"docs/how-to/a.md": "how-to/a.md", "dags/tube_replay.py": "source/dags/tube_replay.py.md"}
    for path, uri in {**targets, "CHANGELOG.md": "source/CHANGELOG.md"}.items():
        assert hooks.site_uri(Path(path)) == uri
        assert hooks.source_path(uri) == Path(path)
