r"""Wrong answers that once counted as right, right ones that did not, and their like, each in a box."""

import pytest

from latex_answers import boxed_answer, equal


def is_right(gold: str, answer: str) -> bool:
    """Whether the answer is right that the box of a sentence holds."""
    boxed = boxed_answer(f"So it is \\boxed{{{answer}}}.")
    return boxed is not None and equal(boxed, gold)


WRONG = r"""
7 || 3+4\mathrm{i}
5 || 5\mathrm{i}
4 || 4\mathrm{e}^2
3+4\mathrm{i} || 7
\frac{\mathrm{d}y}{\mathrm{d}x}=2x || \frac{\mathrm{d}y}{\mathrm{d}x}=3x
\frac{\mathrm{e}}{2} || \frac{\mathrm{nonsense}}{0}
\frac{1}{2^{60}} || \frac{1}{2^{61}}
\frac{1}{2^{60}} || -\frac{1}{2^{61}}
\frac{1}{2^{60}} || -\frac{1}{2^{60}}
\gcd(m,n)=1 || \gcd(m,n)=3
n\equiv 2 \pmod 3 || n\equiv 1 \pmod 3
n\equiv 2 \pmod 3 || n\equiv 2 \pmod 5
\lim_{n\to\infty}a_n=0 || \lim_{n\to\infty}a_n=1
f'(x) || f(x)
f'(x) || f''(x)
f^{-1}(x) || \frac{1}{f(x)}
5 || 5x
5 || 5m
5 || 5i
5 || 5!
5 || 5'
5 || 5^T
5 || 5\text{ million}
5 || 5 squared
5 || 5 halves
5 || 5\text{ is wrong}
5 || \text{not } 5
5 || 3=5
5 || 5\nonsense
5 || 5 \phantom{6}
5 || 6 \\ 5
5 || 5;6
5 || 5 # 6
7 || 12_5
12 || 12_5
a_3 || a
x_{34} || x_{35}
x=5 || y=5
x>2 || x\ge 2
x>2 || -x>-2
x=1,y=2 || 2,1
AB=4,CD=5 || 5, 4
1,2,\ldots,10 || 1,2,10
1+2+\dots+10 || 1+2+10
x^T || x
\vec{v} || v
\hat{x}y || \hat{y}x
\angle ABC || \angle ACB
|x| || x
\frac{dy}{dx} || \frac{y}{x}
\int x\,dy || \int y\,dx
\sum_{k=1}^n k || \sum_{k=0}^n k
(-\infty,2)\cup(3,\infty) || (-\infty,2]\cup(3,\infty)
(0,\infty) || [0,\infty)
\mathbb{R} || R
x\in\mathbb{R} || x\in\mathbb{Z}
\emptyset || \{\emptyset\}
3:30 || 1:10
5\text{ cm}^2 || 5\text{ cm}^3
5\text{ cm} || 5\text{ miles}
18 || 19 dollars
18 || 18 or 19 dollars
\frac{1}{3} || 0.3333333
(\frac{1}{3},2) || (0.333333,2)
\frac{1}{2305843009213693952} || 0.000000000000
0 || 10^{-40}
0 || e^{-1000}
\mathrm{e}^{400} || \mathrm{e}^{400}+1
\sqrt{2} || \sqrt{2}+10^{-50}
x || x+10^{-60}
\left\lfloor\frac{x}{391}\right\rfloor || \left\lfloor\frac{x}{392}\right\rfloor
\log x || \ln x
\sin^{-1} x || \frac{1}{\sin x}
BCA || ABC
2\frac{1}{2} || 1
5 || 2(3)
\frac{1}{2x} || 1/2x
\frac{a}{b}c || a/bc
0.\overline{36} || 0.36
\begin{pmatrix}1\\2\end{pmatrix} || \begin{pmatrix}1\\2\end{pmatrix}^T
p \implies q || q \implies p
\infty || \infty+1
x^2=4 || x=2
5 || x\not=5
5 || x \not = 5
5 || \not 5
5 || \text{not } x=5
x=5 || 3x+7=22
x=5 || 2x=10
x=5 || x-5=0
5 || 3x+7=22
x>5 || 3x+7>22
(-2,2) || x^2<4
-2<x<2 || x^2<4
-2\le x\le 2 || |x|\le 2
(5,\infty) || 3x+7>22
2 || e=3
5 || 5 thirteenths
5 || 5\text{ lakh}
5 || 5 quadrillion
0.3 || 0.3\text{ recurring}
5 || x \lneq = 5
1\oplus 2 || 2\oplus 1
9.5 || 3^2\frac{1}{2}
x_2+\frac{1}{2} || x_2\frac{1}{2}
17/4 || 3\frac{5}{4}
5 || 2\frac{3}{1}
720 || 3!!
-2 || \|\begin{pmatrix}1&2\\3&4\end{pmatrix}\|
720 || 3!!!
\frac{2}{9} || 0.\dot{1}2
\frac{123}{999} || 0.\dot{1}2
\frac{12}{99} || 0.\dot{1}2
1000000000001 || 1000000000002+0\cdot 0.123456789012
0.5 || 0.5+10^{-13}+0\cdot 0.123456789012
AB_{12} || ab_{12}
p\land q || p\lor q
p \text{ or } q || p \text{ and } q
x>1\text{ and }x<3 || x>1\text{ or }x<3
3,3,5 || 3,5,5
3,3,5 || 3,5
1,2,3,\ldots || 1,3,2,\ldots
f(1,-1) || f(\pm 1)
5 || 5\text{ and }5\text{ or }5
(1,3) || x>1, x<3
(1,3) || x>1 \text{ or } x<3
(1,3) || x>1 \text{ and } y<3
(-\infty,1)\cup(2,\infty) || x<1 \text{ and } x>2
(-\infty,1)\cup(2,\infty) || x<1 \text{ or } y>2
(-2,2) || |x|<2
(-2,2) || x^2<4 \text{ and } x<9
x\in(5,\infty) || 3x+7>22
x\in(5,\infty) || y>5
5 || 5\le x\le 5
\{5\} || 5\le x\le 5
(2,\infty) || x\ge 2
[2,\infty) || x>2
(1,2) || x\ne 1
(1,2) || x>1
(1,2) || (1<x, x<2)
\mathbb{R} || x<x+1
\mathbb{R} || x \ne x+1
\vec{AB} || \vec{BA}
\overline{abc} || \overline{acb}
(1,234) || 1234
\{1,234\} || 1234
x_{1,234} || x_{1234}
f(1,234) || f(1234)
(2,\infty) || \{x \mid x\ge 2\}
(2,\infty) || \{x \in\mathbb{Z} \mid x> 2\}
(2,\infty) || \{x \mid 2x>4\}
\{x \mid x>2\} || \{x \mid x>3\}
\{x \mid x>2\} || \{x, x>2\}
2 || \{x \mid x=2, 3\}
\frac{\pi}{2} || 91^\circ
\frac{\pi}{2} || 90
1,2,3 || [1,2,4]
1,2 || [1,2]
\emptyset || \text{one solution}
5 || \text{5 or 6}
5 || \text{5 is wrong}
5 || \text{5}6
3 || \max\{1,2,4\}
(1,2) || \{1 : 2\}
€5 || £5
€5 || \$5
€5 || €6
5 || 5€6
5\text{ pounds} || £5
14 || 14 {, }916
|x|<1 || -1<x<2
-1<x<1 || |x|<1
x^2<4 || x<2
\cos A=\frac12 || A=\frac12
\cos A=\frac12 || \sin A=\frac12
\cos x>\frac12 || x>\frac12
\binom72 || \frac72
f^{(2)}(x) || f^2(x)
f^{(n)}(x) || f^n(x)
f^{(3)}(x) || f''(x)
x=2 \text{ or } x=3 || x\in(2,3)
2,3 || x\in(2,3)
\{2,3\} || x\in[2,3]
5 || 5..
\{0,1\} || 0\le x\le 1
\{x\in\mathbb{Z}\mid x>2\} || (2,\infty)
x>2 || y>2
1<x<2 || y\in(1,2)
5 || 5\text{ fails}
5 || 5\text{ kilo}
5 || 5\text{ under}
5 || 5\text{/x}
5 || 5 m/x
5 || 5 cm xy
3:30 || 0.1
6 || x=5=6
0.5 || 0.5\%
5\text{ mg} || 5\text{ Mg}
20-x || |x-20|
100-n || \sqrt{(n-100)^2}
x-iy || x+iy
\lceil x\rceil || \lfloor x\rfloor+1
\lfloor x+\frac12\rfloor || \lceil x-\frac12\rceil
2\ln x || \ln x^2
\sqrt{2}+10^{-400} || \sqrt{2}
3+\sqrt{2}-10^{-400} || 3+\sqrt{2}
\sin 20^\circ || \sin(20)
40 || 4\phantom{0}0
P(A) || P(A\mid B)
P(A\mid B) || P(B\mid A)
"""
RIGHT = r"""
\mathrm{e}^2 || e^2
1+2\mathrm{i} || 1+2i
\frac{\pi}{2} || pi/2
\frac{\sqrt2}{2} || sqrt(2)/2
\frac{\sqrt2}{2} || √2/2
90^\circ || 90°
90^\circ || 90 degrees
x^2+1 || x**2+1
73 || **73**
18 || 18 dollars
18 || \$18
\$18 || 18 dollars
5 || 5\,\mathrm{m}
30 || 30 \text{ miles per hour}
15\text{ cm}^2 || 15 square centimeters
5\text{ cm} || 5
3\text{ miles} || 3 \text{ mile}
18abc || 18 abc
\frac{\mathrm{d}y}{\mathrm{d}x}=2x || \frac{dy}{dx} = 2x
n\equiv 2 \pmod 3 || n \equiv 5 \pmod{3}
n\equiv 2 \pmod 3 || n \equiv 2 (mod 3)
\lim_{n\to\infty}a_n=0 || \lim\limits_{n \rightarrow \infty} a_{n} = 0
f'(x) || f^{\prime}(x)
\gcd(m,n)=1 || \gcd(n,m)=1
\gcd(12,18) || 6
\mathbf{u}+2\mathbf{v} || 2v+u
2.5x || \frac52 x
0.1\overline{6} || \frac16
\sqrt{17} || 4.123105625617661
(-\infty,2)\cup(3,\infty) || (3, ∞) ∪ (−∞, 2)
x>2 || 2<x
2x+4y-3=0 || y=-\frac{1}{2}x+\frac{3}{4}
12_5 || z = 12_5
\frac{6}{2x} || \frac{3}{x}
(x+1)^2 || x^2+2x+1
\tan^2 x+1 || \sec^2 x
b || a+b-a
2^{n+1} || 2\cdot 2^n
\left|x\right| || |-x|
1:3 || 2:6
\{1\pm\sqrt5,-2\} || -2, 1+\sqrt5, 1-\sqrt5
1-\frac{1}{\mathrm{e}} || 1-e^{-1}
0,111 || 0.111
\frac{1}{2} || e=\frac{1}{2}
3 || i=3
5 || 5\text{ mol}
5 || 5 months
2\hbar || \hbar\cdot 2
\varphi+\theta || \theta+\phi
9/2 || 3^2\frac{1}{2}
\frac{x_2}{2} || x_2\frac{1}{2}
\frac{15}{4} || 3\frac{3}{4}
15 || 5!!
n!!+1 || 1+n!!
|\begin{pmatrix}1&2\\3&4\end{pmatrix}| || -2
0.\dot{1}2\dot{3} || \frac{123}{999}
0.\dot{1}\dot{2} || \frac{12}{99}
0.1\dot{6} || 1/6
\frac{1}{3} || 0.33333333333333\cdot 1
\log_2 3 || \frac{\ln 3}{\ln 2}
\log_2 8 || 3
AB_{16} || ab_{16}
1,2 || 1\text{ or }2
x=1\text{ or }x=2 || x=1\text{ and }x=2
3,4,5 || 3, 4, and 5
\{3,5\} || 3,3,5
x<1 || -x>-1
x^2-5x+6=0 || 2x^2-10x+12=0
x\notin\mathbb{Z} || x\not\in\mathbb{Z}
(2,\infty) || x>2
(2,\infty) || 2<x
[-2,2] || -2\le x\le 2
[-2,2] || 2\ge x\ge -2
-2\le x\le 2 || x\in[-2,2]
(-\infty,1)\cup(2,\infty) || x<1 \text{ or } x>2
x<1 \text{ or } x>2 || (-\infty,1)\cup(2,\infty)
x<1 \text{ or } x>2 || x>2 \text{ or } x<1
x<1 \text{ or } x>2 || x\in(-\infty,1)\cup(2,\infty)
(1,3) || x>1 \text{ and } x<3
1<x<3 || x>1 \text{ and } x<3
x>1 \text{ and } x<3 || 1<x<3
x>1 \text{ and } x<3 || (1,3)
(-\infty,0)\cup(0,\infty) || x\ne 0
\mathbb{R}\setminus\{0\} || x\ne 0
\mathbb{R}\setminus\{0\} || x\neq0
1234 || 1,234\text{ cm}
1234 || 1,234 \text{ dollars}
\frac{617}{2} || \frac{1,234}{4}
1,234\text{ cm}^2 || 1234\text{ cm}^2
(1,234) || (1, 234)
\{1,234\} || \{234, 1\}
\frac{\pi}{2} || 90^\circ
90^\circ || \frac{\pi}{2}
\max\{a,b\} || \max(a,b)
3 || \max\{1,2,3\}
(2,\infty) || \{x \mid x>2\}
(2,\infty) || \{x : x>2\}
(2,\infty) || \{x | x>2\}
(2,\infty) || \{x \in \mathbb{R} \mid x > 2\}
(2,\infty) || \{x\in\mathbb{R} : x > 2\}
\{x \mid x\ne 3\} || (-\infty,3)\cup(3,\infty)
(-\infty,1)\cup(2,\infty) || \{x \mid x<1 \text{ or } x>2\}
x>2 || \{x \mid x>2\}
\{x \mid x>2\} || x>2
1,2,3 || [1,2,3]
(1,2,3) || [1,2,3]
\{1,2,3\} || [1,2,3]
\emptyset || \text{no solution}
\text{no solution} || \emptyset
\text{no real solutions} || \text{No real solutions}
\mathbb{R} || \text{all real numbers}
\mathbb R || \mathbb{R}
x\ge5 || x ⩾ 5
5 || \text{5 cm}
5\text{ cm} || \text{5 cm}
2\text{cis}60^\circ || 1+i\sqrt{3}
\overrightarrow{AB} || \overrightarrow{AB}
\vec{AB}+\vec{CD} || \vec{CD}+\vec{AB}
\vec{v} || \vec v
\overline{AB} || \overline{AB}
\overline{x+y} || \overline{y+x}
1000.99 || 1,000.99€
€5 || 5 euros
5 || £5
1,000.99 || €1,000.99
14916 || 14 {, }916
14,916x || 14{ , }916x
\frac{1}{3} || .\overline{3}
|x|<1 || -1<x<1
\binom72 || 21
\triangle ABC || \triangle{ABC}
\cos A = \frac12 || \frac12
\frac12 || \cos A=\frac12
\frac{\binom52}{3} || \frac{10}{3}
\binom n2 || \frac{n(n-1)}{2}
k > 4 || (4, \infty)
n^{\log_2 3} || 3^{\log_2 n}
\binom{2n}{n} || \frac{(2n)!}{(n!)^2}
\sqrt[3]{2+\sqrt5}+\sqrt[3]{2-\sqrt5} || 1
1\text{ or }-1 || \pm 1
x_{\max}=5 || 5
f^{(2)}(x) || f''(x)
f^{(n)}(x) || f^{( n )}(x)
{a+1 \over 2}+3 || 3+\frac{a+1}{2}
f^{''}(x) || f''(x)
\lim_{x\to 0^+} f(x) || \lim_{x\to 0^{+}}f(x)
\begin{pmatrix}1&2\\3&4\end{pmatrix}^{-1} || \begin{pmatrix}-2&1\\ 1.5&-0.5\end{pmatrix}
\{1,2\}\cap\{2,3\} || \{2\}
[1,2]\cup[2,3] || [1,3]
1\text{ cm}+2\text{ cm} || 2\text{ cm}+1\text{ cm}
2,3 || x\in\{2,3\}
(2,3) || x\in(2,3)
5 || 5.
(1,2)\cup(3,4) || x\in(1,2)\cup(3,4)
\sin 20^\circ || \sin(20^\circ)
\sin^2 20^\circ || \sin(20^\circ)^2
10 || 10\text{ people at the party}
10 || \text{10 people at the party}
18 || \$18\text{ each}
2 || 2\text{ left over}
5 || 5\,\Omega
5 || 5\,k\Omega
2.5 || 2.5\ \mathrm{kg\cdot m^2}
5 || 5\,\mathrm{mol}^{-1}
20 || 20^\circ\mathrm{C}
6 || 6\text{ min}
9.8\frac{m}{s^2} || 9.8 m/s^2
9.8 || 9.8 m/s^2
17 || \approx 17
\frac{1}{3} || P(A\mid B)=\frac13
\frac{1}{3} || P(X \ge 2) = \frac13
\frac{1}{3} || P(A^c)=\frac13
8 || |A\cup B|=8
24 || 4!=24
9 || (f\circ g)(1)=9
2 || \text{Exactly }2
17 || \text{The sum is }17
3.14 || x=\frac{22}{7}=3.14
\begin{pmatrix}1\\2\end{pmatrix} || (1,2)
(3,4) || \begin{cases}x=3\\y=4\end{cases}
22.5 || 22^\circ 30'
1011_2 || (1011)_{\text{two}}
\frac{3}{4} || \textcolor{red}{\nicefrac{3}{4}}
|x-20| || |20-x|
\sqrt{\frac{1}{x}} || \frac{1}{\sqrt{x}}
3\ln x || \ln x^3
(-1)^{n+1} || -(-1)^n
D || \text{Option D}
"""


def pairs(text: str) -> list[tuple[str, ...]]:
    return [tuple(line.split(" || ")) for line in text.strip().splitlines()]


@pytest.mark.parametrize(("gold", "answer"), pairs(WRONG))
def test_a_wrong_answer_is_not_equal(gold: str, answer: str):
    assert not is_right(gold, answer)


@pytest.mark.parametrize(("gold", "answer"), pairs(RIGHT))
def test_a_right_answer_is_equal_in_other_notation(gold: str, answer: str):
    assert is_right(gold, answer)
    assert is_right(gold, gold)
