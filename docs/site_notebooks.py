"""Makes a notebook of every tutorial while the site is built: text and programs as cells, run, with what they print."""

import re
import tempfile
from typing import Any

import nbclient
import nbformat

TUTORIALS = ("tutorials/", "add-a-method.md")


def on_files(files: Any, config: Any) -> Any:
    """Adds the notebooks, executed."""
    from mkdocs.structure.files import File

    for page in [file for file in files.documentation_pages() if file.src_uri.startswith(TUTORIALS)]:
        path = page.src_uri.removesuffix(".md") + ".ipynb"
        files.append(File.generated(config, path, content=nbformat.writes(executed(page.content_string))))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Offers the notebook under the title of its page."""
    uri = page.file.src_uri
    if not uri.startswith(TUTORIALS):
        return markdown
    title, _, rest = markdown.partition("\n")
    name = uri.rpartition("/")[2].removesuffix(".md") + ".ipynb"
    return f"{title}\n\n[This page as a notebook, as it ran]({name})\n{rest}"


def notebook_of(markdown: str) -> Any:
    """A page as a notebook: its python blocks are cells, and so is what stands between them.

    Example:
        >>> [cell.cell_type for cell in notebook_of("# A\\n\\n```python\\nx = 1\\n```\\nb").cells]
        ['markdown', 'code', 'markdown']
    """
    cells = []
    for number, part in enumerate(re.split(r"^```python\n(.*?)^```$", markdown, flags=re.MULTILINE | re.DOTALL)):
        if part.strip():
            new = nbformat.v4.new_code_cell if number % 2 else nbformat.v4.new_markdown_cell
            cells.append(new(part.strip("\n"), id=f"cell-{number}"))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})


def executed(markdown: str) -> Any:
    """The same after it ran, in an empty folder; an error in a cell is one of the build."""
    notebook = notebook_of(markdown)
    with tempfile.TemporaryDirectory() as folder:
        nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": folder}}).execute()
    return notebook
