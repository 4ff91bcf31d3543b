"""docs/templates.md has the table that the code of today gives."""

from __future__ import annotations

import pytest

from tests.extensions.offline.template_table import PAGE, page


@pytest.mark.slow
def test_the_table_of_templates_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.extensions.offline.template_table"
