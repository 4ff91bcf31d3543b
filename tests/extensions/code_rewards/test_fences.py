"""Which part of a model's text is its program."""

import time

import pytest

from async_rl.extensions.code_rewards.fences import extract_program

ADD = "def add(a, b):\n    return a + b"


@pytest.mark.parametrize(
    ("text", "program", "valid"),
    [
        ("```python\nx\n```", "\nx\n", True),
        ("```python\nx\n``` and ```python\ny\n``` end", "\ny\n", True),
        ("```python\nx", "\nx", True),
        ("```\nx\n```", "```\nx\n```", False),
        ("x", "x", False),
        ("", "", False),
        ("```pythonic\nx\n```", "```pythonic\nx\n```", False),
        ("```python-repl\nx\n```", "```python-repl\nx\n```", False),
        ("So:\n```python\nx\n```\nIt prints\n```text\n3\n```\n", "\nx\n", True),
        ("````python\nx\n```\ny\n````", "\nx\n```\ny\n", True),
        ("~~~python\nx\n~~~", "\nx\n", True),
        ("```python x = 1``` and more", " x = 1", True),
    ],
)
def test_the_program_is_what_follows_the_last_fence(text: str, program: str, valid: bool):
    assert extract_program(text) == (program, valid)


@pytest.mark.parametrize("language", ["python", "py", "Python", "PYTHON", "python3", "Py3", " python", "py "])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_a_fence_may_call_python_by_any_of_its_names(language: str, line_end: str):
    program, valid = extract_program(line_end.join([f"Here:```{language}", "x = 1", "```", "done"]))
    assert (program.strip() if program else None, valid) == ("x = 1", True)


@pytest.mark.parametrize(
    "attributes", [' title="a.py"', "{.numberLines}", " {linenos=1} title='my file.py' ", ' a-b="" {}']
)
def test_what_says_how_a_fence_looks_is_not_in_its_program(attributes: str):
    program, _ = extract_program(f"```python{attributes}\nprint(1)\n```")
    assert (program or "").strip() == "print(1)"


@pytest.mark.parametrize("program", [' x="a"; print(x)', " {1: 2}.get(1)", ' print({"a"})'])
def test_a_program_in_the_fences_line_is_kept(program: str):
    assert extract_program(f"```python{program}\n```").answer == f"{program}\n"


@pytest.mark.parametrize("indent", ["  ", "    ", "\t"])
@pytest.mark.parametrize("closed", [True, False])
def test_an_indented_fence_has_a_program_without_its_indentation(indent: str, closed: bool):
    lines = ["```python", *ADD.split("\n"), *(["```"] if closed else [])]
    program, valid = extract_program("1. First\n" + "\n".join(indent + line for line in lines))
    assert (program.strip() if program else None, valid) == (ADD, True)


def test_a_line_that_is_indented_less_keeps_the_program_as_it_is():
    text = 'if x:\n    print("""\n  y""")'
    assert extract_program(f"```python\n{text}\n```").answer == f"\n{text}\n"


def test_backticks_inside_a_line_belong_to_the_program():
    assert extract_program("```python\nprint('```')\nprint(2)\n```").answer == "\nprint('```')\nprint(2)\n"


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
    [
        ADD,
        "# better than add(a, b)\nprint(1)",
        "print('add(a, b)')",
        '"""Not\nadd(a, b)."""\nprint(1)',
        "add = max\nprint(add(1, 2))",
        "self.add(1)",
        "print(1 if input() else 2)",
    ],
)
def test_a_second_program_that_stands_by_itself_is_the_answer(second: str):
    text = f"```python\n{ADD}\nprint(add(1, 2))\n```\nNo, rather\n```python\n{second}\n```"
    assert extract_program(text).answer == f"\n{second}\n"


@pytest.mark.parametrize(
    "text",
    [
        "```python\n" * 100_000,
        "```python x " * 80_000,
        "```python {" * 80_000,
        "x" + "`" * 1_000_000 + "python x",
        "```python\nx" + "`" * 1_000_000 + "x",
        "```python\n" + "x``` y" * 200_000,
        "```python" + ' a=""' * 200_000,
        "```python" + "{a}" * 300_000 + "{" * 100_000,
        "```python\n" + " " * 300_000 + "x",
        "```python\n" + "'" * 1_000_000,
        "```python\n" + "\\'" * 500_000,
        "```python\n" + "''\n" * 300_000,
        "```python\n" + "\n\t" * 500_000,
        "```python\n" + "def " * 250_000,
        "```python\n" + "x " * 250_000 + "=",
        "```python\n" + "\n".join(f"def f{i}(): g{i}(f{i - 1}())\n```\n```py" for i in range(20_000)),
    ],
)
def test_a_hostile_text_takes_linear_time(text: str):
    start_s = time.process_time()
    extract_program(text, "f")
    assert time.process_time() - start_s < 5
