"""What pyproject.toml cannot say: recipes/ is written there, and a wheel has it inside the package.

An editable installation has no copy: `d5suite bench` finds the checkout's recipes.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithRecipes(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib, "d5suite", "recipes")
        self.mkpath(str(target))
        for path in sorted(Path("recipes").glob("test_*.py")):
            self.copy_file(str(path), str(target / path.name))


setup(cmdclass={"build_py": BuildWithRecipes})
