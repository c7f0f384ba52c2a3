"""The comparison with other people's code, without that code."""

import peers_table


def test_the_page_has_the_table_of_the_results():
    lines = peers_table.RESULTS.read_text().splitlines()
    rows = [peers_table.json.loads(line) for line in lines]
    page = peers_table.RESULTS.with_name("README.md").read_text("utf-8")
    assert peers_table.table(rows) in page
