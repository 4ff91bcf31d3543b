r"""Makes ``data/math_pairs.jsonl`` from the tests that other projects publish. Run by hand:

    pip download --no-deps --no-binary :all: -d SDISTS math-verify==0.9.0 lm-eval==0.4.13 sympy==1.14.0
    python tests/collect_math_pairs.py SDISTS

Every (gold, prediction, equal?) of a source is taken but for the classes counted under ``left out``, which are told
from the form of a case and never from what this project's comparison makes of it:

- *math-verify*: the parametrized cases of (gold, pred) in its tests. A side with one box is reduced to what is in it.
  Left out: a prediction that is prose (words before the mathematics, or over 200 characters without a box; its tests
  look for an answer in running text, our rewards never do), several different boxes in a side (ours is the last one
  alone), a case that sets an option of the library which we don't have (``strict``, a rounding of 2 digits, ...),
  a box that is not closed, a case twice. ``math_pairs_left_out.jsonl`` has all of them but the last kind, with our
  verdicts and reasons. It was written by hand; this program checks that none is missing.
- *lm-eval*: ``tests/test_minerva_math.py``, its calls and parameters of equivalence, written out below: one file, with
  a different shape in every test.
- *sympy*: ``GOOD_PAIRS`` of its LaTeX parser's tests (LaTeX, expression): the LaTeX is the prediction, the printed
  value of the expression (``latex(expression.doit())``) the gold answer, equal. And each LaTeX with the gold answer of
  the pair after the next, where sympy can tell the two apart (at a point, or by structure): not equal. Left out: what
  is no answer to a question (bras and kets, limits, derivatives, integrals, sums and products that are left to be
  worked out, conjugates, functions without a definition, primed names), what sympy prints in a notation that only it
  reads (names of two letters and more), and logarithms without a base, of which sympy says e and others 10.

One label is corrected (``CORRECTED``): it calls 1 - 1/e and 1 + 1/e equal.
"""

from __future__ import annotations

import ast
import json
import math
import re
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from latex_answers import boxed_answer

OUT = Path(__file__).resolve().parent / "data" / "math_pairs.jsonl"
LEFT_OUT = OUT.with_name("math_pairs_left_out.jsonl")
OPTIONS = {"strict": True, "allow_set_relation_comp": False, "precision": 6}
"""Of math-verify's cases, and the value that is its default."""
CORRECTED = {("$1 - \\frac{1}{\\mathrm{e}}$", "$1 + \\frac{1}{\\mathrm{e}}$"): False}
_PROSE = re.compile(r"\s*[^\W\d_]{2,}[\s:,]+\S")
_MATHEMATICS = re.compile(r"\$|\\\(|\\\[|\d")

LM_EVAL = (
    # test_unparseable_answer_matches_itself, test_parseable_answer_still_matches_itself
    *((answer, answer, True) for answer in (
        "(2,4)", "(-1,2,3)", "[2,5)", "(-\\infty,3]", "\\begin{pmatrix}1\\\\2\\end{pmatrix}", "2", "\\frac{1}{2}",
        "x+1", "\\text{east}",
    )),
    # test_different_answers_are_not_equivalent, test_two_empty_answers_are_not_a_match
    ("(2,4)", "(3,5)", False), ("[2,5)", "[2,6)", False), ("(2,4)", "(4,2)", False),
    ("\\text{east}", "\\text{west}", False), ("", "", False),
    # test_mathematically_equal_answers_still_compare_equal
    ("\\frac{1}{2}", "0.5", True),
    # test_true_thousands_separators_are_still_stripped, test_negative_thousands_grouping_is_stripped
    ("100000", "100,000", True), ("115000", "115,000", True), ("1000", "1,000", True), ("61328", "61,328", True),
    ("-1024", "-1,024", True),
    # test_bare_digit_tuple_is_not_fused, test_malformed_grouping_is_left_untouched: what must not become one number
    ("01", "0,1", False), ("357", "3,5,7", False), ("12106", "12,10,6", False), ("1234", "12,34", False),
    ("12345678", "1234,5678", False),
    # test_equiv_harm_case_tuple_spelling_variants
    ("0,1", "0, 1", True),
    # test_normalize_preserves_indexed_roots, test_is_equiv_indexed_roots_through_pipeline, ..._shorthand_still_works
    ("\\sqrt[3]{8}", "\\sqrt[3]8", True), ("\\sqrt{2}", "\\sqrt2", True), ("2", "\\sqrt[3]{8}", True),
    ("\\sqrt[3]{2}", "\\sqrt[3]2", True), ("2", "\\sqrt[4]{16}", True), ("2\\sqrt{2}", "\\sqrt8", True),
)  # fmt: skip


def main() -> None:
    sdists = Path(sys.argv[1])
    left_out: Counter[str] = Counter()
    rows: list[dict[str, Any]] = []
    known: set[tuple[str, str]] = set()
    for source in (math_verify(sdists, left_out), lm_eval(), sympy_pairs(sdists, left_out)):
        for row in source:
            if (row["gold"], row["prediction"]) in known:
                left_out[f"{row['source'].split()[0]}: twice"] += 1
                continue
            known.add((row["gold"], row["prediction"]))
            rows.append(row)
    OUT.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    listed = Counter(f"math-verify: {json.loads(line)['left_out']}" for line in LEFT_OUT.open(encoding="utf-8"))
    counted = {why: left_out[why] for why in left_out if why.startswith("math-verify") and why != "math-verify: twice"}
    if listed != counted:
        sys.exit(f"expected {LEFT_OUT.name} to list {counted}, got {dict(listed)}; add the cases and our verdicts")
    for name, count in sorted(Counter((row["source"].split()[0], row["equal"]) for row in rows).items()):
        print(f"{name[0]:<12} equal: {name[1]!s:<6} {count}")
    for why, count in sorted(left_out.items()):
        print(f"left out: {count:>4}  {why}")


def read(sdists: Path, pattern: str, members: str) -> Iterator[tuple[str, str]]:
    """(path inside, text) of the files whose path matches ``members`` in the sdist that matches ``pattern``."""
    (path,) = sdists.glob(pattern)
    with tarfile.open(path) as archive:
        for member in sorted(archive.getmembers(), key=lambda one: one.name):
            if re.fullmatch(members, member.name):
                content = archive.extractfile(member)
                assert content is not None
                yield member.name.partition("/")[2], content.read().decode()


def math_verify(sdists: Path, left_out: Counter[str]) -> Iterator[dict[str, Any]]:
    for path, text in read(sdists, "math_verify-0.9.0.tar.gz", r"[^/]+/tests/test_\w+\.py"):
        for function, case in parametrized(text):
            gold, why = reduced(case["gold"])
            prediction, why = (None, why) if why else reduced(case["pred"])
            if any(case.get(option, default) != default for option, default in OPTIONS.items()):
                why = "sets an option"
            if why:
                left_out[f"math-verify: {why}"] += 1
                continue
            equal = CORRECTED.get((case["gold"], case["pred"]), bool(case.get("expected", case.get("result"))))
            yield {"gold": gold, "prediction": prediction, "equal": equal, "source": f"math-verify {path}:{function}"}


def parametrized(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(test function, its arguments by name) of every case that has a gold answer and a prediction."""
    for node in ast.parse(text).body:
        for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            if not isinstance(decorator, ast.Call) or len(decorator.args) != 2:
                continue
            names = [name.strip() for name in ast.literal_eval(decorator.args[0]).split(",")]
            if names[:2] != ["gold", "pred"]:
                continue
            cases = eval(compile(ast.Expression(decorator.args[1]), "cases", "eval"), {"math": math})
            yield from ((node.name, dict(zip(names, case))) for case in cases)  # pyright: ignore[reportAttributeAccessIssue]


def reduced(text: str) -> tuple[str | None, str]:
    """What a side says, and why it is left out (empty if it isn't)."""
    if "\\boxed" in text:
        parts = text.split("\\boxed{")[1:]
        inside = {boxed_answer("\\boxed{" + part) for part in parts}
        if len(inside) > 1:
            return None, "several boxes"
        answer = boxed_answer(text)
        return answer, "" if answer else "a box that is not closed"
    before = text[: found.start()] if (found := _MATHEMATICS.search(text)) else ""
    if len(text) > 200 or _PROSE.match(before + "x"):
        return None, "an answer in prose"
    return text.strip(), ""


def lm_eval() -> Iterator[dict[str, Any]]:
    for gold, prediction, equal in LM_EVAL:
        where = "lm-eval tests/test_minerva_math.py"
        yield {"gold": gold, "prediction": prediction, "equal": equal, "source": where}


def sympy_pairs(sdists: Path, left_out: Counter[str]) -> Iterator[dict[str, Any]]:
    import sympy
    from sympy.core.function import AppliedUndef
    from sympy.physics.quantum.state import Bra, Ket

    ((path, text),) = read(sdists, "sympy-1.14.0.tar.gz", r"[^/]+/sympy/parsing/tests/test_latex\.py")
    namespace: dict[str, Any] = {}
    exec(compile(text, path, "exec"), namespace)
    calculus = (sympy.Limit, sympy.Derivative, sympy.Integral, sympy.Sum, sympy.Product)
    no_answers = (Bra, Ket, AppliedUndef, sympy.conjugate, *calculus)
    pairs: list[tuple[str, Any, str]] = []
    for latex, expression in namespace["GOOD_PAIRS"]:
        value = sympy.sympify(expression)
        names = {str(symbol) for symbol in value.free_symbols}
        if value.has(*no_answers) or any("'" in name for name in names):
            left_out["sympy: no answer to a question"] += 1
        elif any("_" in name or (len(name) > 1 and name not in GREEK) for name in names):
            left_out["sympy: notation of its own"] += 1
        elif re.search(r"\\(?:log|lg)(?![A-Za-z_])", latex):
            left_out["sympy: a logarithm without a base"] += 1
        else:
            value = value.doit()
            pairs.append((latex, value, str(sympy.latex(value, ln_notation=True, inv_trig_style="full"))))
    where = f"sympy {path}:GOOD_PAIRS"
    for index, (latex, value, gold) in enumerate(pairs):
        yield {"gold": gold, "prediction": latex, "equal": True, "source": where}
        _, other, other_gold = pairs[(index + 2) % len(pairs)]
        if differ(value, other):
            yield {"gold": other_gold, "prediction": latex, "equal": False, "source": where}
        else:
            left_out["sympy: the pair after the next is, or may be, equal"] += 1


GREEK = {"alpha", "beta", "gamma", "delta", "theta", "lambda", "mu", "pi", "rho", "sigma", "phi", "psi", "omega"}


def differ(one: Any, other: Any) -> bool:
    """Whether two values are surely not the same: they differ at a point, or are of different kinds."""
    import sympy

    if not (isinstance(one, sympy.Expr) and isinstance(other, sympy.Expr)):
        return isinstance(one, sympy.Expr) != isinstance(other, sympy.Expr) or (
            type(one) is type(other) and one != other
        )
    symbols = sorted(one.free_symbols | other.free_symbols, key=str)
    point: dict[Any, Any] = {symbol: sympy.Rational(index + 3, 7) for index, symbol in enumerate(symbols)}
    try:
        gap = abs(complex((one - other).subs(point).evalf()))
    except (TypeError, ValueError):
        return False
    return gap > 1e-6


if __name__ == "__main__":
    main()
