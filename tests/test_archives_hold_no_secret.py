"""What a run archives of its environment and command line tells how it ran, and no secret."""

import os
import subprocess
import sys

import pytest

from parallel.record import environment
from parallel.record.environment import command_line, environment_facts, hide
from tests.conftest import ROOT

SECRETS = {
    "DB_PASS": "hunter2a",
    "MYSQL_PWD": "hunter2b",
    "GH_PAT": "hunter2c",
    "SSHPASS": "hunter2d",
    "AUTHORIZATION": "Bearer hunter2e",
    "https_proxy": "http://me:hun/ter2f@proxy:3128",
    "SLURM_JWT": "hunter2g",
    "SLURM_EXPORT_ENV": "ALL,DB_PASS=hunter2h",
    "NCCL_SECRET_SAUCE": "hunter2i",
    "CUDA_DB": "hunter2j",
    "WANDB_API_KEY": "hunter2k",
    "BASH_FUNC_login%%": "() { curl -u me:hunter2l; }",
    # In variables that are told.
    "TORCH_HOME": "https://me:hun/ter2m@store/torch",
    "NCCL_NET_PLUGIN": "x password=hunter2n",
    "LD_PRELOAD": "Bearer hunter2o",
    "UCX_TLS": "ghp_hunter2p0123456789abcdef0123456789",
}
FACTS = {
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "CUDA_VISIBLE_DEVICES": "0,1",
    "NCCL_DEBUG": "INFO",
    "NCCL_IB_HCA": "mlx5_0:1",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "4",
    "TORCH_DISTRIBUTED_DEBUG": "INFO",
    "PATH": "/opt/keys/bin:/usr/bin",
    "LOADEDMODULES": "cuda/12.4:nccl/2.20",
    "MASTER_ADDR": "node1",
    "RANK": "0",
    "LD_LIBRARY_PATH": "/opt/auth/lib:/usr/lib",
}


def test_an_archived_environment_tells_facts_and_no_secret():
    told = environment_facts(SECRETS | FACTS)
    assert FACTS.items() <= told.items()
    assert "ter2" not in str(told)
    told_of_secrets = {"TORCH_HOME", "NCCL_NET_PLUGIN", "LD_PRELOAD", "UCX_TLS"}
    assert set(told) == FACTS.keys() | told_of_secrets  # the list alone, and no name like it


@pytest.mark.parametrize("before", [False, True])
def test_the_scripts_archive_is_its_owners_alone_from_the_first_byte(tmp_path, before):
    file = tmp_path / "7.env"
    if before:
        file.write_text("of an earlier attempt")
        file.chmod(0o644)
    done = subprocess.run(
        [sys.executable, "-m", "parallel.record.environment", str(file)],
        cwd=ROOT,
        env=SECRETS | FACTS | {"TWO": "lines\nhunter2q"},
        umask=0,
    )
    text = file.read_text()
    assert done.returncode == 0 and file.stat().st_mode & 0o777 == 0o600
    assert "ter2" not in text and "NCCL_IB_HCA=mlx5_0:1\n" in text
    assert "other variables are not archived" in text


@pytest.mark.parametrize(
    ("typed", "archived"),
    [
        (["-m", "x", "--train-tokens", "512", "--lr=1"], "-m x --train-tokens 512 --lr=1"),
        (["--train-tokens=300B", "--n-keys", "3"], "--train-tokens=300B --n-keys 3"),
        (["--api-token", "abc", "--lr", "1"], "--api-token *** --lr 1"),
        (["--api-token=abc", "--token", "512"], "--api-token=*** --token ***"),
        (["--password", "two words", "-x"], "--password *** -x"),
        (["--password", "-dash", "a"], "--password *** a"),
        (["--db-pass", "1234", "--auth", "--lr", "1"], "--db-pass *** --auth --lr 1"),
        (["DB_PASS=x", "--gh-pat", "y"], "DB_PASS=*** --gh-pat ***"),
        (["--data", "s3://me:p/w@host/x"], "--data s3://***@host/x"),
        (["--header", "Authorization: Bearer abc"], "--header Authorization: Bearer ***"),
        (["-p", "abc", "-p", "8080"], "-p *** -p 8080"),
        (["https://a.net/x?sv=1&sig=a%2Bb=&se=2"], "https://a.net/x?sv=1&sig=***&se=2"),
        (
            ["https://a.net/x?X-Amz-Date=1&X-Amz-Signature=0a1b"],
            "https://a.net/x?X-Amz-Date=1&X-Amz-Signature=***",
        ),
        (["https://hooks.slack.com/services/T0/B0/x1"], "https://hooks.slack.com/***"),
        (["https://discord.com/api/webhooks/1/x-Y"], "https://discord.com/api/webhooks/***"),
        (["https://a.office.com/webhook/1@2/In/3"], "https://a.office.com/webhook/***"),
        (["npm_hunter2p0123456789abcdef0123456789"], "***"),
        (["--run-name", "hf-zero3-dp8-mbs4", "--compass", "north"], None),
    ],
)
def test_a_command_line_keeps_its_numbers_and_hides_its_secrets(typed, archived):
    assert command_line(typed) == (archived or " ".join(typed))


HARMLESS = """/opt/keys/bin:/usr/bin GPU-8f2b1c9e-aaaa-bbbb-cccc-0123456789ab node[1-2,4]:29500
expandable_segments:True,max_split_size_mb:512 granularity=fine,compact,1,0 hf_zero3_on_two_nodes
npm_config_cache https://a.net/x?sigma=1 https://a.net/docs/hooks.html slurm/hooks/prolog.sh
export=NCCL_IB_HCA=mlx5_0:1 network={NCCL_SOCKET_IFNAME="ib0"}""".split()


@pytest.mark.parametrize("word", HARMLESS)
def test_what_is_no_secret_stays_as_it_is(word):
    assert hide(word) == word


@pytest.mark.parametrize("words", ["pipe", "env.txt --hide pipe"])
def test_a_device_or_pipe_keeps_its_mode(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe", 0o666)
    mode = os.stat("pipe").st_mode
    assert environment.main(words.split()) == 2
    assert "pipe: not a regular file" in capsys.readouterr().err
    assert os.stat("pipe").st_mode == mode
