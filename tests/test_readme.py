"""The README's example runs as it stands."""

import pathlib
import re

README = pathlib.Path(__file__).parents[1] / "README.md"


def test_the_example_computes_a_loss(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    exec(code, {})
    assert 5.4 < float(capsys.readouterr().out.split()[0]) < 5.7  # log(256), nearly
