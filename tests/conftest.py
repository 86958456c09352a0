"""Files in the order of their length: the longest begin, or two workers would not end together."""

LONGEST = """test_edits test_readme test_train_clm test_train_mlm test_hub test_losses test_hub_run
    test_crash test_milestones test_saved_models test_fsdp test_model_types test_plan test_prepare
    test_bad_input""".split()


def pytest_collection_modifyitems(items):
    def place(item):
        return LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST)

    items.sort(key=place)
