"""The paper's tables, one TOML file each."""
