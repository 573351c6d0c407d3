pytest_plugins = ["dp_compile.testing.plugin"]
