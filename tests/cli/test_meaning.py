"""What a job file stands for."""

import pytest

from headwater.cli.jobfile import read_job
from headwater.cli.meaning import near_options, transforms_of
from headwater.errors import ConfigError

JOB = """
[model]
name = "timm:resnet18"
[data]
url = "s3://photos/train"
transforms = {transforms}
{more}
"""


def job(folder, transforms="[]", more=""):
    path = folder / "job.toml"
    path.write_text(JOB.format(transforms=transforms, more=more))
    return read_job(path)


def test_a_module_beside_the_job_file_is_found(tmp_path):
    (tmp_path / "steps_beside_the_job.py").write_text("def make():\n    return ['steps']\n")
    assert near_options(job(tmp_path, '"steps_beside_the_job:make"'))["transforms"] == ["steps"]


def test_validation_has_transforms_of_its_own(tmp_path):
    file = job(tmp_path, '[{op = "RandomResizedCrop", size = 4}]', 'validation_transforms = [{op = "ToFloat"}]')
    assert transforms_of(file, file.data.validation_transforms) == [{"op": "ToFloat"}]


@pytest.mark.parametrize("field", ['cut = "fc"', 'codec = "fp16"', 'precision = "int8"', 'profile = "p.json"',
                                   'prongs = "mte"'])  # fmt: skip
def test_a_plan_that_is_given_fixes_all_of_it(tmp_path, field):
    with pytest.raises(ConfigError, match="fixes all of the plan"):
        near_options(job(tmp_path, more=f'[plan]\nfile = "plan.json"\n{field}'))
    assert near_options(job(tmp_path, more='[plan]\nfile = "plan.json"'))["plan"] == tmp_path / "plan.json"
    assert "plan" not in near_options(job(tmp_path, more=f'[plan]\nfile = "auto"\n{field}'))


def test_threads_of_the_embedded_node_and_no_planning_at_all_can_be_asked_for(tmp_path):
    found = near_options(job(tmp_path, more='[nodes]\nthreads = 2\n[plan]\nfile = "none"\ncodec = "fp16"'))
    assert (found["node_threads"], found["plan"], found["codec"]) == (2, None, "fp16")
    assert near_options(job(tmp_path))["node_threads"] is None
