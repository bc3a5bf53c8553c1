"""`swarm`: what people run to start, watch, plan or use a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agora.cli import console

if TYPE_CHECKING:
    from agora.tuning.base.hub import Kind

app = console.new_app("Start, watch and use training runs.\n\nExample: swarm demo", "swarm")

PRESET = Annotated[
    str | None, typer.Option(help="The model: tiny, small, 150m, 1b or 8b. Default tiny.", show_default=False)
]
START = Annotated[
    str | None,
    typer.Option("--preset", help="What to start from; see the list below. Default tiny.", show_default=False),
]
DATA = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE",
        help="What to learn: chats, answers, preferences or text; a file, a folder of files, a data set of the Hub "
        "(ORG/NAME), or - for standard input. May be given several times.",
    ),
]
ROLES = Annotated[
    str | None,
    typer.Option(metavar="NAME=ROLE,...", help="Maps other names of roles to system, user, assistant and tool."),
]
ROLE_ORDER = Annotated[
    str | None,
    typer.Option(metavar="turns|any", help="Whether user and assistant must take turns; default turns."),
]
SKIP_BAD = Annotated[
    bool, typer.Option("--skip-bad", help="Leave malformed records out, and list them, instead of ending at the first.")
]
BAD_REPORT = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write there all records that --skip-bad left out.")
]
TOO_LONG = Annotated[
    str | None,
    typer.Option(metavar="cut|drop", help="Samples longer than the context lose their end, or are left out."),
]
CHAT_TEMPLATE = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|NAME",
        help="The chat template instead of the model's: a file, chatml, gemma, llama3 or qwen3, or one that the model "
        "has under a name.",
    ),
]
COLUMNS = Annotated[
    str | None, typer.Option(metavar="NAME=COLUMN,...", help="Maps the format's fields to the file's columns.")
]
OBJECTIVE = Annotated[
    str | None, typer.Option(metavar="lm|sft|dpo", help="What is to be learnt; default what the format is for.")
]
TRAIN = Annotated[
    str | None, typer.Option(metavar="all|lora", help="Which parameters; default lora for sft and dpo, all for lm.")
]
FROZEN_AS = Annotated[
    str | None, typer.Option(metavar="float32|bf16|nf4", help="How lora keeps the base model's weights; default bf16.")
]
EPOCHS = Annotated[float | None, typer.Option(min=0.01, max=1000, help="How often the data is seen; default once.")]
BASE_MODEL_TO_TRAIN = Annotated[
    Path | None,
    typer.Option(
        "--base-model",
        metavar="DIR|ORG/NAME",
        help="Train this Hugging Face model further: a folder, or an id of the Hub, ORG/NAME[@REVISION].",
    ),
]
ADAPTER = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR|ORG/NAME",
        help="Go on from this LoRA adapter of the base model: a folder of peft or `swarm export`, or an id of the Hub.",
    ),
]
BASE_MODEL_TO_TUNE = Annotated[
    Path | None,
    typer.Option("--base-model", metavar="DIR|ORG/NAME", help="Tune this Hugging Face model instead."),
]
TEXTS = Annotated[
    list[str] | None,
    typer.Option(metavar="stdlib|PATH...", help="Texts; with --base-model one data file. Default stdlib."),
]
SHARD_SIZE = Annotated[
    str | None, typer.Option(metavar="SIZE", help="The most that a weights file holds; default 5GB.")
]
MERGE = Annotated[bool, typer.Option("--merge", help="Write the base model with the run's LoRA adapter added to it.")]
BASE_MODEL_TO_MERGE = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR|ORG/NAME",
        help="The base model's folder or Hub id; default AGORA_BASE_MODEL, then agora.toml, then what `agora-node "
        "join` used.",
    ),
]


@app.command()
def new(
    path: Annotated[Path, typer.Argument(metavar="run.toml", help="The file to write.")],
    start: START = None,
    base_model: BASE_MODEL_TO_TRAIN = None,
    adapter: ADAPTER = None,
    data: DATA = None,
    objective: OBJECTIVE = None,
    columns: COLUMNS = None,
    roles: ROLES = None,
    role_order: ROLE_ORDER = None,
    skip_bad: SKIP_BAD = False,
    bad_report: BAD_REPORT = None,
    too_long: TOO_LONG = None,
    chat_template: CHAT_TEMPLATE = None,
    train: TRAIN = None,
    frozen_as: FROZEN_AS = None,
    epochs: EPOCHS = None,
    name: Annotated[str | None, typer.Option(help="The run's name; default the file's.")] = None,
    as_json: console.JSON = False,
) -> None:
    """Write a commented manifest to edit.

    The manifest is the whole description of a run: model, stages, optimizer, data, who may join. Its hash is the run's
    id, so edit it before the first `agora-node join`, which signs it.

    Presets, by their parameters: tiny (0.7 M, trains on a laptop in a minute), small (20 M), 150m, 1b and 8b (for GPUs
    of 8 to 80 GB, see docs/reference/presets.md).

    With --base-model, the run begins with the weights in that folder (config.json, safetensors files, tokenizer.json);
    of a model of the Hub only such files are fetched. Who joins fetches what its stages need from peers, or names the
    model too.
    With --data it learns from a file that `swarm data` reads, which is counted first; see docs/use/tuning.md.

    \b
    Examples:
      swarm new run.toml
      swarm new poems.toml --preset small --name poems
      swarm new further.toml --base-model ./Qwen3-0.6B
      swarm new chats.toml --base-model Qwen/Qwen3-0.6B --data chats.jsonl --frozen-as nf4
      swarm new more.toml --base-model ./Qwen3-0.6B --adapter ./adapter --data more.jsonl
    """
    from agora.cli import data_command, new_command

    reading = data_command.ReadingChoice(columns, roles, role_order, skip_bad, too_long, chat_template, bad_report)
    choice = new_command.TuningChoice(tuple(data or ()), objective, train, frozen_as, epochs, reading, adapter)
    new_command.run(path, start, base_model, name, choice, as_json=as_json)


@app.command()
def status(
    run: console.RUN,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every 2 seconds until Ctrl-C.")] = False,
    as_json: console.JSON = False,
    directory: console.DIRECTORY = None,
) -> None:
    """Show a run's stages, peers, step, loss, throughput and health.

    A daemon of the run on this machine answers at once; otherwise a peer of the invite is asked over the network. Exit
    code: 0 OK, completed or paused, 3 degraded, 4 stalled or unreachable.

    \b
    Examples:
      swarm status run.toml --watch
      swarm status agora://... --json
    """
    from agora.cli import status_command

    raise typer.Exit(status_command.show(run, directory, watch=watch, as_json=as_json))


@app.command()
def page(
    run: console.RUN,
    port: Annotated[int, typer.Option(min=0, max=65_535, help="The port; 0 lets the system choose.")] = 8800,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Where to listen; others than loopback see it.")] = (
        "127.0.0.1"
    ),
    directory: console.DIRECTORY = None,
) -> None:
    """Show a run live in a browser.

    Stages and why they wait, loss, throughput, peers, averaging, what has happened, what the model writes, and how to
    join. A daemon of the run on this machine is asked, otherwise a peer of the invite. The page can only be read, and
    the run goes on without it. There is no password: --host 0.0.0.0 shows it to everyone who can reach this machine.

    \b
    Examples:
      swarm page run.toml
      swarm page agora://... --port 8801
    """
    from agora.cli import page_command

    raise typer.Exit(page_command.serve(run, directory, (host, port)))


@app.command()
def track(
    run: console.RUN,
    to: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND:PLACE", help="tensorboard:DIR, wandb[:PROJECT] or mlflow[:URI]; may be repeated."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Send what is there and end, as for cron.")] = False,
    directory: console.DIRECTORY = None,
) -> None:
    """Send a run's metrics to TensorBoard, Weights & Biases or MLflow.

    Anyone who can read the run's status can do so, from one machine: the run does not know of it. A daemon of the run
    on this machine writes its metrics down meanwhile, so what was missed is sent at the next start, each row once;
    otherwise a peer of the invite is asked. The packages are extras: pip install 'agora-swarm[tensorboard]', [wandb],
    [mlflow]. Names: docs/use/metrics.md.

    \b
    Examples:
      swarm track run.toml --to tensorboard:./tb
      swarm track agora://... --to wandb:my-project --to mlflow:http://127.0.0.1:5000
    """
    from agora.cli import track_command

    raise typer.Exit(track_command.track(run, to or (), directory, once=once))


@app.command()
def demo(
    peers: Annotated[int, typer.Option(min=1, max=256, help="How many daemons.")] = 4,
    stages: Annotated[int, typer.Option(min=1, max=64, help="How many stages the model is cut into.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of stage 0 to train.")] = 40,
    data: TEXTS = None,
    more_data: Annotated[list[str] | None, typer.Argument(hidden=True, metavar="PATH")] = None,
    preset: PRESET = None,
    base_model: BASE_MODEL_TO_TUNE = None,
    adapter: ADAPTER = None,
    objective: OBJECTIVE = None,
    codec: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A codec for all of the width, such as bf16; default the preset's boundary."),
    ] = None,
    link: console.LINK = None,
    kill_every: Annotated[
        float | None, typer.Option(min=0.5, metavar="SECONDS", help="SIGKILL a random peer at this interval.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seeds weights, data order and which peer is killed.")] = 0,
    directory: Annotated[
        Path | None, typer.Option("--dir", metavar="DIR", help="Keep everything here; default a temporary directory.")
    ] = None,
    as_json: console.JSON = False,
) -> None:
    """Train a whole swarm on this machine, one process per daemon.

    Every daemon has its own libp2p host and DHT node and they find each other as they would over the internet. With
    --kill-every a random peer is killed at that interval and a fresh one takes its place; no microbatch of a living
    origin that keeps its stages is lost.

    With --base-model the run is the one that `swarm new --base-model DIR --data FILE` describes, with --adapter the one
    that goes on from that adapter.

    \b
    Examples:
      swarm demo
      swarm demo --base-model base --data base/data/sft.jsonl --peers 2
      swarm demo --base-model base --adapter adapter --data more.jsonl
      swarm demo --peers 8 --stages 4 --steps 100 --kill-every 10 --json
    """
    from agora.cli import demo_command as command

    if more_data and not data:
        raise console.Failure(f"{more_data[0]} belongs to no flag; texts are given with --data", console.EXIT_USAGE)
    texts = (*(data or ("stdlib",)), *(more_data or ()))
    options = command.DemoOptions(
        peers=peers,
        stages=stages,
        steps=steps,
        data=texts,
        preset=preset,
        codec=codec,
        link=link,
        kill_every=kill_every,
        seed=seed,
        directory=directory,
        base_model=_find_folder(base_model),
        adapter=_find_folder(adapter, "adapter"),
        objective=objective,
    )
    raise typer.Exit(command.run(options, as_json=as_json))


@app.command()
def export(
    run: console.RUN,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder to write; it appears when it is complete.")
    ] = None,
    push: Annotated[
        str | None, typer.Option(metavar="ORG/NAME", help="Publish it on the Hugging Face Hub, in one commit.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="A repository that --push makes is private.")] = False,
    gguf: Annotated[bool, typer.Option("--gguf", help="Write one file for llama.cpp and Ollama instead.")] = False,
    average: console.AVERAGE = True,
    dtype: Annotated[str, typer.Option(metavar="float32|bf16", help="What the weights are written as.")] = "float32",
    shard_size: SHARD_SIZE = None,
    merge: MERGE = False,
    base_model: BASE_MODEL_TO_MERGE = None,
    force: Annotated[bool, typer.Option("--force", help="Replace DIR if it is an earlier export.")] = False,
    directories: console.CHECKPOINTS = None,
    as_json: console.JSON = False,
) -> None:
    """Write the run's model as a Hugging Face folder.

    AutoModelForCausalLM.from_pretrained(DIR) loads it. Of a run that trains LoRA it writes the adapter, which
    PeftModel.from_pretrained(base, DIR) loads onto the base model; with --merge the whole model.

    A daemon of the run on this machine collects every stage from the swarm; without one, the newest whole checkpoints
    in the data directories are taken. Everything is checked against the manifest before anything is written. With
    --push, which needs a login (`hf auth login`), an earlier export of the run is replaced there, and nothing else.
    Exit code: 4 when a stage is neither in the swarm nor on this machine.

    \b
    Examples:
      swarm export run.toml --out model
      swarm export agora://... --out model --dtype bf16 --dir ./one --dir ./two
      swarm export tuned.toml --out merged --merge --base-model ./Qwen3-0.6B
      swarm export run.toml --push my-org/my-model
      swarm export run.toml --gguf --out model-gguf
    """
    from agora.cli import export_command as command

    raise typer.Exit(
        command.run(
            run,
            out,
            directories or (),
            push=push,
            private=private,
            gguf=gguf,
            average=average,
            dtype=dtype,
            shard_size=shard_size,
            merge=merge,
            base_model=base_model,
            force=force,
            as_json=as_json,
        )
    )


@app.command()
def invite(
    run: console.RUN,
    peer: Annotated[
        str | None, typer.Option(metavar="ID", help="Only this machine may use it; default whoever has the invite.")
    ] = None,
    days: Annotated[float, typer.Option(metavar="N", help="For how many days the ticket counts.")] = 30.0,
    role: Annotated[
        str, typer.Option(metavar="member|reader|delegate", help="To train, to read the status, or to invite others.")
    ] = "member",
    directory: console.DIRECTORY = None,
    as_json: console.JSON = False,
) -> None:
    """Print an invite of a run, with a ticket where it needs one.

    Only the founder's machine, or a delegate's, can sign tickets. Keep an invite with a ticket secret unless --peer
    names its machine: whoever has it may join. The run's id does not change, and no peer needs to be told.

    \b
    Examples:
      swarm invite run.toml
      swarm invite run.toml --peer 12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB --days 365
      swarm invite run.toml --role reader --days 7
    """
    from agora.cli import signing_command as command

    raise typer.Exit(command.print_invite(run, command.InviteRequest(peer, days, role), directory, as_json=as_json))


@app.command()
def ban(
    run: console.RUN,
    peer: Annotated[
        str, typer.Argument(metavar="PEER", help="A peer's id, or that of a bearer ticket as `swarm invite` prints it.")
    ],
    directory: console.DIRECTORY = None,
    as_json: console.JSON = False,
) -> None:
    """Ban a peer from a run for good, in every mode.

    Signed with the founder's key, or a delegate's, and handed to a daemon here or to any peer of the run. Within
    seconds every peer has it, ends its connection with the banned one, and keeps the ban over restarts.

    \b
    Example:
      swarm ban run.toml 12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB
    """
    from agora.cli import signing_command as command

    raise typer.Exit(command.ban(run, peer, directory, as_json=as_json))


@app.command()
def amend(
    run: console.RUN,
    from_step: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="The first optimizer step that has the new values.")
    ] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="A new value; may be repeated.")
    ] = None,
    is_list: Annotated[
        bool, typer.Option("--list", help="Print the amendments that the run has, and sign none.")
    ] = False,
    directory: console.DIRECTORY = None,
    as_json: console.JSON = False,
) -> None:
    """Change a live run: its learning rate, its end, the tokens of a step, the weights of its texts, the oldest version
    that takes part.

    Signed with the founder's key, or a delegate's, and handed to a daemon here or to any peer of the run. All peers
    take the values at the same step, which must be at least 20 ahead. What no amendment may change needs a new run.

    \b
    Examples:
      swarm amend run.toml --from-step 1500 --set optimizer.total_steps=4000
      swarm amend run.toml --from-step 1500 --set optimizer.learning_rate=1e-3 --set optimizer.warmup_steps=0
      swarm amend run.toml --list
    """
    from agora.cli import amend_command as command

    if is_list:
        if sets or from_step is not None:
            raise console.Failure("--list signs nothing; leave out --set and --from-step", console.EXIT_USAGE)
        raise typer.Exit(command.list_amendments(run, directory, as_json=as_json))
    raise typer.Exit(command.amend(run, from_step, sets or [], directory, as_json=as_json))


@app.command()
def evaluate(
    run: console.RUN,
    tasks: Annotated[
        list[str],
        typer.Argument(
            metavar="TASK...", help="Files of tasks, the built-in sums, agreement, repeats, or lm-eval:NAME."
        ),
    ],
    items: Annotated[int, typer.Option(metavar="N", min=0, help="The most items of each task; 0: all.")] = 0,
    share: Annotated[
        float,
        typer.Option(metavar="PART", help="The most that it may take of the tokens that are trained on meanwhile."),
    ] = 0.02,
    directory: console.DIRECTORY = None,
    as_json: console.JSON = False,
) -> None:
    """Measure the swarm's present model, while it trains.

    Texts give the loss per token and the perplexity; questions with choices give the accuracy, by the log-probability
    of each choice. Everything goes through the live pipeline, at a small part of its tokens. Asks a daemon of this
    machine that holds stage 0, which has the tokenizer.

    \b
    Examples:
      swarm evaluate poems sums agreement
      swarm evaluate poems held-out.txt quiz.jsonl --items 200
      swarm evaluate poems quiz.jsonl --share 1
      swarm evaluate poems lm-eval:arc_easy --items 100
    """
    from agora.cli import evaluate_command

    raise typer.Exit(evaluate_command.evaluate(run, tasks, items, share, directory, as_json=as_json))


@app.command()
def launch(
    run: console.RUN,
    on: Annotated[
        str, typer.Option("--on", metavar="ssh|slurm|kubernetes|skypilot", help="The tool that starts them.")
    ],
    count: Annotated[int, typer.Option(metavar="N", help="How many machines; of ssh as many as hosts.")] = 1,
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="KIND", help="GPUs of each machine, as the tool names them: H100, or H100:4; each joins as a peer."
        ),
    ] = None,
    host: Annotated[
        list[str] | None, typer.Option(metavar="USER@HOST", help="A machine for ssh; may be given several times.")
    ] = None,
    program: Annotated[
        str | None, typer.Option(metavar="PATH", help="agora-node on those machines, if it is installed there already.")
    ] = None,
    package: Annotated[
        str | None, typer.Option(metavar="SPEC", help="What pip installs there; default this version of agora-swarm.")
    ] = None,
    image: Annotated[str | None, typer.Option(help="The container image for Kubernetes.")] = None,
    wait: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="How long to wait for the joins.")] = 600.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the job and the commands, and do nothing.")] = False,
    down: Annotated[bool, typer.Option("--down", help="Make what was launched leave, and end the job.")] = False,
    directory: console.DIRECTORY = None,
    as_json: console.JSON = False,
) -> None:
    """Start daemons elsewhere, through the tool that you have.

    Writes the job for ssh, Slurm, Kubernetes or SkyPilot, submits it through that tool, and waits for the machines to
    join. RUN is an invite, or the name or manifest of a run of which a daemon runs here. No machine holds a role: what
    was launched is a peer like any other.

    \b
    Examples:
      swarm launch agora://... --on ssh --host ada@lab1 --host ada@lab2
      swarm launch poems --on slurm --count 8 --gpus a100 --dry-run
      swarm launch poems --on skypilot --count 4 --gpus RTX4090
      swarm launch poems --on slurm --down
    """
    from agora.cli import launch_command as command
    from agora.cli.launch_jobs.job import LaunchRequest

    chosen = {"gpus": gpus, "program": program, "package": package, "image": image}
    request = LaunchRequest(
        command.tool_of(on),
        count,
        hosts=tuple(host or ()),
        **{name: value for name, value in chosen.items() if value is not None},
    )
    raise typer.Exit(
        command.launch(run, request, directory, is_dry=dry_run, is_down=down, wait_s=wait, as_json=as_json)
    )


@app.command()
def sample(
    run: console.RUN,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to go on from; may be empty.")],
    tokens: Annotated[int, typer.Option(min=1, max=100_000, help="The most tokens to write.")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0.01, max=10.0, help="Lower is likelier, higher is more surprising.")
    ] = 0.8,
    seed: Annotated[int | None, typer.Option(min=0, help="Draws the same text again; default a new one.")] = None,
    average: console.AVERAGE = True,
    base_model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR|ORG/NAME",
            help="The base model's folder or Hub id; default AGORA_BASE_MODEL, then agora.toml, then what `agora-node "
            "join` used.",
        ),
    ] = None,
    directories: console.CHECKPOINTS = None,
    as_json: console.JSON = False,
) -> None:
    """Let the run's present model go on from a text.

    The weights come from where `swarm export` takes them: a daemon of the run on this machine collects every stage from
    the swarm, while it trains on; without one, the newest checkpoints are read. Sampled on this machine's processor.
    Exit code: 4 when a stage is neither in the swarm nor on this machine.

    \b
    Examples:
      swarm sample run.toml "def main():"
      swarm sample run.toml "" --tokens 50 --seed 1 --json
      swarm sample tuned.toml "Hello" --base-model ./Qwen3-0.6B
    """
    from agora.cli import sample_command as command

    sampling = command.SamplingOptions(tokens, temperature, seed)
    places = directories or ()
    raise typer.Exit(
        command.run(run, prompt, places, sampling=sampling, average=average, base_model=base_model, as_json=as_json)
    )


@app.command()
def data(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Data files, folders of them or saved by `datasets`, data sets of the Hub (ORG/NAME), - for standard "
            "input.",
        ),
    ],
    base_model: Annotated[
        Path | None,
        typer.Option(metavar="DIR|ORG/NAME", help="The model with tokenizer and chat template; default plain bytes."),
    ] = None,
    columns: COLUMNS = None,
    roles: ROLES = None,
    role_order: ROLE_ORDER = None,
    skip_bad: SKIP_BAD = False,
    bad_report: BAD_REPORT = None,
    too_long: TOO_LONG = None,
    chat_template: CHAT_TEMPLATE = None,
    objective: OBJECTIVE = None,
    context: Annotated[
        int | None, typer.Option(min=2, help="Most tokens of a sequence; default 1024, or what the model has.")
    ] = None,
    as_json: console.JSON = False,
) -> None:
    """Show what a data file is before anything is trained on it.

    Prints the format that was recognised and by which columns, three samples with the supervised part marked, how long
    the samples are, how many would be truncated, and how full packed sequences would be. Reads chat messages, ShareGPT,
    Alpaca, prompt and completion, preferences and plain text, as .jsonl, .ndjson, .json, .csv, .tsv, .parquet or .txt,
    compressed or not, or a datasets folder; see docs/use/data.md. `swarm new` takes the same flags.

    \b
    Examples:
      swarm data chats.jsonl --base-model ./Qwen3-0.6B
      swarm data answers.parquet --columns prompt=question,completion=answer --context 2048
      swarm data shards/ more.jsonl.zst --skip-bad --bad-report bad.txt
      swarm data calls.jsonl --columns role=speaker,content=said --roles agent=assistant,customer=user
      zcat chats.jsonl.gz | swarm data - --chat-template qwen3
    """
    from agora.cli import data_command

    reading = data_command.ReadingChoice(columns, roles, role_order, skip_bad, too_long, chat_template, bad_report)
    with data_command.local_files(files) as found:
        options = data_command.DataOptions(found, _find_folder(base_model), objective, context, reading)
        raise typer.Exit(data_command.run(options, as_json=as_json))


@app.command()
def mesh(
    machines: Annotated[
        Path | None, typer.Argument(metavar="[MACHINES]", help="The list of machines, such as machines.toml.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the configurations are written.")] = Path("mesh"),
    new_key: Annotated[
        Path | None,
        typer.Option("--new-key", metavar="FILE", help="Make this machine's key and print its public part."),
    ] = None,
    as_json: console.JSON = False,
) -> None:
    """Write a WireGuard configuration for each machine of a list.

    So a run can have a network of its own. Each machine makes its key itself and only its public part goes into the
    list, so no configuration holds a secret.
    Machines behind NATs reach each other through the first one that has an endpoint.

    \b
    Examples:
      swarm mesh --new-key /etc/wireguard/agora.key
      swarm mesh machines.toml --out mesh
    """
    from agora.cli import mesh_command

    if new_key is not None and machines is None:
        raise typer.Exit(mesh_command.make_key(new_key, as_json=as_json))
    if machines is None or new_key is not None:
        raise console.Failure("give either a list of machines or --new-key FILE", console.EXIT_USAGE)
    raise typer.Exit(mesh_command.write_configurations(machines, out, as_json=as_json))


@app.command()
def simulate(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO.toml", help="Machines, a model, churn and faults.")],
    plots: Annotated[Path | None, typer.Option(metavar="DIR", help="Write plots (SVG) into this folder.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Random seed, instead of the scenario's.")] = None,
    as_json: console.JSON = False,
) -> None:
    """Run the daemon's own decisions on simulated machines.

    Routing, the opening of microbatches and placement use the code that `agora-node` runs. Machines, thousands of them,
    links, churn and time are simulated. The same scenario and seed give the same result. See docs/use/simulator.md.

    \b
    Examples:
      swarm simulate deploy/preemptible.toml --plots plots
      swarm simulate deploy/preemptible.toml --seed 7 --json
    """
    from agora.cli import simulate_command

    raise typer.Exit(simulate_command.run(scenario, seed=seed, plots=plots, as_json=as_json))


@app.command()
def plan(
    run: console.RUN,
    peers: Annotated[Path, typer.Option(metavar="peers.toml", help="The machines: one [[machine]] table for each.")],
    picture: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Also write the picture as SVG.")] = None,
    add: Annotated[
        str | None,
        typer.Option(metavar="KIND", help="Say what one more of this kind adds; default: of each kind."),
    ] = None,
    as_json: console.JSON = False,
) -> None:
    """Show which machine should hold which stages, and the speed.

    It also says what holds the swarm back, and what one more machine would add.
    Each table of peers.toml has a kind (a100, rtx4090, t4 ...) or flops_tflops and memory_gb, and upload_mbps; also
    name, count, download_mbps, host_memory_gb and latency_ms. Nothing is started or measured.

    \b
    Examples:
      swarm plan run.toml --peers peers.toml
      swarm plan run.toml --peers peers.toml --picture plan.svg --add a100
    """
    from agora.cli import plan_command

    raise typer.Exit(plan_command.run(plan_command.PlanOptions(run, peers, picture, add), as_json=as_json))


def _find_folder(named: Path | None, kind: Kind = "model") -> Path | None:
    if named is None:
        return None
    from agora.tuning.base.hub import find_or_fetch_folder

    return find_or_fetch_folder(named, lambda where: console.print_to_stderr(f"hub          {where}"), kind)


def main() -> None:
    """Runs the command `swarm` with the process's arguments, and ends the process with its exit code."""
    console.run(app)


if __name__ == "__main__":
    main()
