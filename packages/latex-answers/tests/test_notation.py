"""What people type instead of LaTeX, in LaTeX."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latex_answers.notation import in_latex


@pytest.mark.parametrize(
    ("text", "latex"),
    [
        ("**73**", "73"),
        ("x**2+1", "x^{2}+1"),
        ("x**(n+1)", "x^(n+1)"),
        ("90\u00b0", "90^\\circ "),
        ("\u221a2/2", "\\sqrt{2}/2"),
        ("x\u00b2\u2212x\u207b\u00b9", "x^{2}-x^{-1}"),
        ("a\u2081\u2080", "a_{10}"),
        ("2\u03c0r", "2\\pi r"),
        ("\\mathrm{e}^2", "e^2"),
        ("1+2\\mathrm{i}", "1+2i"),
        ("x^\\mathrm{e}", "x^{e}"),
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
        # Signs as Chinese texts have them, and other forms of the same signs.
        ("\uff081\uff0c2\uff09", "(1,2)"),
        ("\uff3b1\u30012\uff3d", "[1,2]"),
        ("\uff58\uff1e\uff12\u3002", "x>2."),
        ("\uff5b1\uff0c2\uff5d", "\\{1,2\\}"),
        ("\U0001d465+1", "x+1"),
        ("1\u2156", "1\\frac{2}{5}"),
        ("7\u20448", "7/8"),
        ("20\u2103", "20\u00b0C"),
        ("20\\,^{\\circ}\\mathrm{C}", "20\\,\u00b0C"),
        ("20\\degree", "20^\\circ "),
        ("22^\\circ 30'", "(22+30/60+0/3600)^\\circ "),
        ("22^{\\circ}30'15''", "(22+30/60+15/3600)^\\circ "),
        ("P(A|B)=1", "P(A\\mid B)=1"),
        ("(|x|,|y|)", "(|x|,|y|)"),
        ("(f\\circ g)(2)", "f(g(2))"),
        ("^3/_4", "\\frac{3}{4}"),
        ("\\textcolor{red}{5}", "{5}"),
        ("\\begin{cases}x=3,\\\\y=4\\end{cases}", "x=3,y=4"),
        ("5,", "5"),
        ("5\\,", "5\\,"),
    ],
)
def test_other_notations_become_latex(text: str, latex: str):
    assert in_latex(text) == latex


@pytest.mark.parametrize(
    "sign",
    [
        "**", "__", "\\not", "\\{", "\\{x", "\\mathrm", "\\mathbb", "{\\rm", "2**", "\u20ac", "(", "^", "1^\\circ",
        "\\color{", "(f\\circ g)(",
    ],
)  # fmt: skip
def test_the_time_for_a_long_answer_is_linear(sign: str):
    # In this process, whatever a model wrote. A cubic time would be hours.
    start = time.process_time()
    for gap in (" ", "\n", "1,"):
        in_latex(sign + gap * 50_000 + "x")
    assert time.process_time() - start < 1.0


@settings(deadline=None)
@given(st.text(alphabet="\\mathrmeid{}^_ *2x1", max_size=40), st.text(max_size=60))
def test_no_digit_is_lost_and_any_text_has_a_notation(formula: str, anything: str):
    assert re.findall("[0-9]", in_latex(formula)) == re.findall("[0-9]", formula)
    in_latex(anything)
