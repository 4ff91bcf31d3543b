"""Which part of a model's text is its program."""

import time

import pytest

from async_rl.extensions.code_rewards.fences import extract_program

ADD = "def add(a, b):\n    return a + b"


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\nx\n```", "\nx\n"),
        ("```python\nx\n``` and ```python\ny\n``` end", "\ny\n"),
        ("So:\n```python\nx\n```\nIt prints\n```text\n3\n```\n", "\nx\n"),
        ("```python\nx", "\nx"),
        ("````python\nx\n```\ny\n````", "\nx\n```\ny\n"),
        ("~~~python\nx\n~~~", "\nx\n"),
        ("```python\nprint('```')\nprint(2)\n```", "\nprint('```')\nprint(2)\n"),
        # A program in the fence's line, and what only says how the fence looks.
        ("```python x = 1``` and more", " x = 1"),
        ('```python x="a"; print(x)\n```', ' x="a"; print(x)\n'),
        ("```python {1: 2}.get(1)\n```", " {1: 2}.get(1)\n"),
        ('```python title="a.py"\nx\n```', "\nx\n"),
        ("```python{.numberLines} title='my file.py' a-b=\"\" {}\nx\n```", "\nx\n"),
        ("```python {linenos=1}\nx\n```", "\nx\n"),
        # A line that is indented less keeps the program as it is.
        ('```python\nif x:\n    print("""\n  y""")\n```', '\nif x:\n    print("""\n  y""")\n'),
    ],
)
def test_the_program_is_what_follows_the_last_fence(text: str, program: str):
    assert extract_program(text) == (program, True)


@pytest.mark.parametrize(
    "text", ["```\nx\n```", "x", "", "```pythonic\nx\n```", "```python-repl\nx\n```"]
)  # fmt: skip
def test_without_a_fence_of_python_the_whole_text_is_the_program(text: str):
    assert extract_program(text) == (text, False)


@pytest.mark.parametrize("language", ["python", "py", "PYTHON", "python3", "Py3", " python", "py "])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_a_fence_may_call_python_by_any_of_its_names(language: str, line_end: str):
    program, valid = extract_program(line_end.join([f"Here:```{language}", "x = 1", "```", "done"]))
    assert (program.strip() if program else None, valid) == ("x = 1", True)


@pytest.mark.parametrize("indent", ["  ", "    ", "\t"])
@pytest.mark.parametrize("closed", [True, False])
def test_an_indented_fence_has_a_program_without_its_indentation(indent: str, closed: bool):
    lines = ["```python", *ADD.split("\n"), *(["```"] if closed else [])]
    program, valid = extract_program("1. First\n" + "\n".join(indent + line for line in lines))
    assert (program.strip() if program else None, valid) == (ADD, True)


@pytest.mark.parametrize(
    "example",
    [
        "print(add(2, 3))  # 5",
        "assert add(2, 3) == 5",
        ">>> add(2, 3)\n5",
        "from solution import add\nresult = add(2, 3)",
        "a, b = map(int, input().split())\nprint(add(a, b))",
    ],
)
@pytest.mark.parametrize("function", [None, "add"])
def test_an_example_of_its_use_does_not_replace_a_program(example: str, function: str | None):
    text = f"```python\n{ADD}\n```\nYou call it so:\n```python\n{example}\n```"
    assert extract_program(text, function).answer == f"\n{ADD}\n"


def test_the_program_defines_the_function_that_the_tests_call():
    text = f"```python\n{ADD}\n```\nFor example with\n```python\nnums = [1, 2]\n```"
    assert extract_program(text, "add").answer == f"\n{ADD}\n"
    assert extract_program(text, "nums").answer == "\nnums = [1, 2]\n"
    method = "class Solution:\n    def add(self, a, b):\n        return a + b"
    text = f"```python\n{method}\n```\n```python\nprint(Solution().add(1, 2))\n```"
    assert extract_program(text, "add").answer == f"\n{method}\n"


@pytest.mark.parametrize(
    "second",
    [ADD, "print('add(a, b)')", '"""Not\nadd(a, b)."""\nprint(1)', "add = max\nprint(add(1, 2))", "self.add(1)"],
)
def test_a_second_program_that_stands_by_itself_is_the_answer(second: str):
    text = f"```python\n{ADD}\nprint(add(1, 2))\n```\nNo, rather\n```python\n{second}\n```"
    assert extract_program(text).answer == f"\n{second}\n"


@pytest.mark.parametrize(
    "text",
    [
        "```python\n" * 100_000,
        "```python x " * 80_000,
        "x" + "`" * 1_000_000 + "python x",
        "```python\nx" + "`" * 1_000_000 + "x",
        "```python\n" + "x``` y" * 200_000,
        "```python" + ' a=""' * 200_000,
        "```python" + "{a}" * 300_000 + "{" * 100_000,
        "```python\n" + " " * 300_000 + "x",
        "```python\n" + "'" * 1_000_000,
        "```python\n" + "\\'" * 500_000,
        "```python\n" + "''\n" * 300_000,
        "```python\n" + "def " * 250_000,
        "```python\n" + "x " * 250_000 + "=",
        "```python\n" + "\n".join(f"def f{i}(): g{i}(f{i - 1}())\n```\n```py" for i in range(20_000)),
    ],
)
def test_a_hostile_text_takes_linear_time(text: str):
    start_s = time.process_time()
    extract_program(text, "f")
    assert time.process_time() - start_s < 5
