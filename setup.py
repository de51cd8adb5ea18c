"""Adds the C core to the build; everything else is in pyproject.toml, which has no word for cffi modules."""

from setuptools import setup

setup(cffi_modules=["src/quire/_native_build.py:ffibuilder"])
