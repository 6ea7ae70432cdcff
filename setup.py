"""Packaging: metadata is in pyproject.toml, how the library is built in build_tools/build.py."""

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PEP 517 runs this file without it

from build_tools import toolchain
from build_tools.build import all_sources, build, install


class BuildWithNinja(build_ext):
    """Has ninja build the library and puts it where setuptools wants the extension module."""

    def build_extension(self, ext):
        install(build("package"), Path(self.get_ext_fullpath(ext.name)))


setup(
    # The name ends in .abi3.so, the wheel's tag in cp310-abi3: one wheel for every Python and torch.
    ext_modules=[Extension("flash_mla._flashmla_C", sources=[], py_limited_api=True)],
    cmdclass={"build_ext": BuildWithNinja},
    options={
        "bdist_wheel": {"py_limited_api": "cp310"},
        "build": {"build_base": "build/setuptools"},
    },
    # Asked for only if missing, which a list in pyproject.toml cannot express: with torch and nvcc
    # on the machine, an isolated build downloads neither.
    setup_requires=[
        *toolchain.torch_requirements(),
        *toolchain.nvcc_requirements(),
        *toolchain.cutlass_requirements(all_sources()),
    ],
)
