"""One adapter over one stream gives one record."""
