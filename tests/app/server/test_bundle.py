"""The scripts of the page are joined into one that does the same."""

from __future__ import annotations

import pytest

from app.server.bundle import bundled_scripts
from app.server.quicker_gradio import quicker_scripts


def written(folder, **texts: str):
    for name, text in texts.items():
        (folder / f"{name}.js").write_text(text)
    return folder


def test_each_module_is_once_there_behind_those_that_it_imports(tmp_path):
    folder = written(
        tmp_path,
        main='import { one as first } from "./one.js";\nimport "./two.js";\n\nfirst();\n',
        one='import {\n    two,\n} from "./two.js";\n\nexport function one() {\n    two();\n}\n',
        two="export const two = () => {};\nconst own = 1;\n",
    )
    assert bundled_scripts(folder, "main.js") == (
        "// two.js\nconst module0 = (() => {\n"
        "const two = () => {};\nconst own = 1;\nreturn { two };\n})();\n"
        "// one.js\nconst module1 = (() => {\n"
        "const {\n    two,\n} = module0;\n\nfunction one() {\n    two();\n}\n"
        "return { one };\n})();\n"
        "// main.js\nconst module2 = (() => {\nconst { one: first } = module1;\n\nfirst();\n})();\n"
    )


@pytest.mark.parametrize(
    "text",
    ["export default 1;\n", 'import x from "./two.js";\n', "export const a = 1,\n    b = 2;\n"],
)
def test_other_forms_are_refused(tmp_path, text):
    with pytest.raises(ValueError, match=r"main\.js: cannot be bundled"):
        bundled_scripts(written(tmp_path, main=text, two=""), "main.js")


def test_modules_that_import_each_other_are_refused(tmp_path):
    each = 'import { a } from "./{}.js";\n'
    folder = written(tmp_path, one=each.replace("{}", "two"), two=each.replace("{}", "one"))
    with pytest.raises(ValueError, match="imports itself"):
        bundled_scripts(folder, "one.js")


def test_gradio_has_the_function_that_is_replaced():
    """Without it, the page works and opens more slowly."""
    assert quicker_scripts()
