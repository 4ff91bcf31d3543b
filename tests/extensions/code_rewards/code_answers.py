"""Programs written for the rows of tests/data: for each, one that is right and one that is wrong on some test."""

from __future__ import annotations

CODE_CONTESTS = [
    # How many different lcm(a, b) / a: the divisors of b. Wrong: counts them up to the root only.
    (
        "b = int(input())\ncount = 0\ni = 1\nwhile i * i <= b:\n    if b % i == 0:\n"
        "        count += 1 if i * i == b else 2\n    i += 1\nprint(count)",
        "b = int(input())\nprint(sum(b % i == 0 for i in range(1, int(b ** 0.5) + 1)))",
    ),
    # Subtract the smallest prime divisor until 0. Wrong: right for even numbers only.
    (
        "n = int(input())\nd = 2\nwhile d * d <= n and n % d:\n    d += 1\nif n % d:\n    d = n\n"
        "print(1 + (n - d) // 2)",
        "print(int(input()) // 2)",
    ),
    # Choose t actors, at least 4 boys and 1 girl. Wrong: forgets the girl.
    (
        "from math import comb\nn, m, t = map(int, input().split())\n"
        "print(sum(comb(n, b) * comb(m, t - b) for b in range(4, t)))",
        "from math import comb\nn, m, t = map(int, input().split())\n"
        "print(sum(comb(n, b) * comb(m, t - b) for b in range(4, t + 1)))",
    ),
    # Multiply by 2 and 3 from n to m. Wrong: never says that it is impossible.
    (
        "n, m = map(int, input().split())\nq, r = divmod(m, n)\nmoves = 0\nfor f in (2, 3):\n"
        "    while q % f == 0:\n        q //= f\n        moves += 1\nprint(moves if q == 1 and r == 0 else -1)",
        "n, m = map(int, input().split())\nq = m // n\nmoves = 0\nfor f in (2, 3):\n"
        "    while q % f == 0:\n        q //= f\n        moves += 1\nprint(moves)",
    ),
    # Colours of a path: p if n is a power of the prime p, else 1. Wrong: the smallest prime factor.
    (
        "n = int(input())\np = 2\nwhile p * p <= n and n % p:\n    p += 1\nif p * p > n:\n    print(n)\nelse:\n"
        "    while n % p == 0:\n        n //= p\n    print(p if n == 1 else 1)",
        "n = int(input())\np = 2\nwhile p * p <= n and n % p:\n    p += 1\nprint(n if p * p > n else p)",
    ),
    # The k-th smallest divisor. Wrong: counts from 0.
    (
        "n, k = map(int, input().split())\nsmall = [i for i in range(1, int(n ** 0.5) + 1) if n % i == 0]\n"
        "large = [n // i for i in reversed(small) if i * i != n]\nfound = small + large\n"
        "print(found[k - 1] if k <= len(found) else -1)",
        "n, k = map(int, input().split())\nfound = [i for i in range(1, 10 ** 5) if n % i == 0]\n"
        "print(found[k] if k < len(found) else -1)",
    ),
]

_READ = "from ast import literal_eval\n"

MBPP = [
    (
        "s = eval(input())\nseen = set()\nfound = None\nfor c in s:\n    if c in seen:\n        found = c\n"
        "        break\n    seen.add(c)\nprint(found)",
        "print(eval(input())[0])",
    ),
    (
        "n = int(input())\nfound = [1]\nrest = list(range(2, n + 1))\nwhile rest:\n    found.append(rest[0])\n"
        "    del rest[:: rest[0]]\nprint(found)",
        "print([n for n in range(1, int(input()) + 1) if n % 2])",
    ),
    (_READ + "print(' '.join(reversed(literal_eval(input()).split())))", _READ + "print(literal_eval(input())[::-1])"),
    (
        "n = int(input())\nprint(n > 1 and all(n % d for d in range(2, int(n ** 0.5) + 1)))",
        "print(True)",
    ),
    ("import math\nprint(math.radians(float(input())))", "print(round(float(input()) * 3.14 / 180, 2))"),
    (
        _READ + "text = literal_eval(input())\npart = literal_eval(input())\nat = text.index(part)\n"
        "print((part, at, at + len(part)))",
        _READ + "text = literal_eval(input())\npart = literal_eval(input())\nprint((part, text.index(part)))",
    ),
    (
        "n = int(input())\nrow = [1]\nfor _ in range(n):\n    new = [row[-1]]\n    for value in row:\n"
        "        new.append(new[-1] + value)\n    row = new\nprint(row[0])",
        "n = int(input())\nprint(n * (n + 1) // 2)",
    ),
    None,  # a periodic function that the row does not describe
    (
        _READ + "items = literal_eval(input())\nk = int(input())\nprint(items[: k - 1] + items[k:])",
        _READ + "items = literal_eval(input())\nk = int(input())\nprint(items[:k] + items[k + 1 :])",
    ),
    (
        _READ + "rows = literal_eval(input())\nn = int(input())\nprint(max(row[n] for row in rows))",
        _READ + "rows = literal_eval(input())\nn = int(input())\nprint(min(row[n] for row in rows))",
    ),
]
"""In the order of mbpp_10.jsonl."""
