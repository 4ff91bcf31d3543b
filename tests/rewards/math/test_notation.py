"""What people type instead of LaTeX, in LaTeX."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.rewards.math.notation import in_latex


@pytest.mark.parametrize(
    ("text", "latex"),
    [
        ("**73**", "73"),
        ("**x+1**.", "x+1"),
        ("2**3*x", "2^{3}*x"),
        ("x**2+1", "x^{2}+1"),
        ("x**-1", "x^{-1}"),
        ("x**(n+1)", "x^(n+1)"),
        ("90\u00b0", "90^\\circ "),
        ("\u221a2/2", "\\sqrt{2}/2"),
        ("2\u221a113", "2\\sqrt{113}"),
        ("x\u00b2\u2212x\u207b\u00b9", "x^{2}-x^{-1}"),
        ("a\u2081\u2080", "a_{10}"),
        ("2\u03c0r", "2\\pi r"),
        ("\\mathrm{e}^2", "e^2"),
        ("1+2\\mathrm{i}", "1+2i"),
        ("\\operatorname{i}", "i"),
        ("x^\\mathrm{e}", "x^{e}"),
        ("2\\cdot\\mathrm{e}", "2\\cdot e"),
        ("\\frac{\\mathrm{d}y}{\\mathrm{d} x}", "\\frac{dy}{d x}"),
        ("\\mathrm{\\pi}r", "\\pi r"),
        ("{\\rm d}x", "dx"),
        ("\\mathbf{v}+\\boldsymbol{AB}", "v+{AB}"),
        ("\\mathbb{R}", "\\mathbb{R}"),
        # A unit keeps its type: 5\mathrm{m} is a length, and no product.
        ("5\\mathrm{m}", "5\\mathrm{m}"),
        ("5\\text{ cm}", "5\\text{ cm}"),
        ("\\\\left( 3 \\\\right)", "\\left( 3 \\right)"),
        ("\\begin{pmatrix}a\\\\bc\\end{pmatrix}", "\\begin{pmatrix}a\\\\bc\\end{pmatrix}"),
    ],
)
def test_other_notations_become_latex(text: str, latex: str):
    assert in_latex(text) == latex


@pytest.mark.parametrize("sign", ["**", "__", "\\not", "\\{", "\\{x", "\\mathrm", "\\mathbb", "{\\rm", "2**", "\u20ac"])
def test_the_time_for_a_long_answer_is_linear(sign: str):
    # In this process, whatever a model wrote. A cubic time would be hours.
    start = time.process_time()
    for gap in (" ", "\n", "1,"):
        in_latex(sign + gap * 50_000 + "x")
    assert time.process_time() - start < 1.0


@given(st.text(alphabet="\\mathrmeid{}^_ *2x1", max_size=40), st.text(max_size=60))
def test_no_digit_is_lost_and_any_text_has_a_notation(formula: str, anything: str):
    assert re.findall("[0-9]", in_latex(formula)) == re.findall("[0-9]", formula)
    in_latex(anything)
