"""A script that completes commands and options in bash and zsh, made from the parser."""

from __future__ import annotations

import argparse

SHELLS = ("bash", "zsh")

_SCRIPT = """\
_commfuse() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" words
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="{commands}"
  else
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
  fi
  COMPREPLY=()
  case "$word" in
    -*) COMPREPLY=($(compgen -W "$words" -- "$word")) ;;
    *) [ "$COMP_CWORD" -eq 1 ] && COMPREPLY=($(compgen -W "$words" -- "$word")) ;;
  esac
}}
complete -o default -F _commfuse commfuse
"""


def completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script for one of SHELLS: `eval "$(commfuse --print-completion bash)"` turns it on."""
    (commands,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    for command in commands.choices.values():
        command.load()
    cases = [f'      {name}) words="{_long_options(command)}" ;;' for name, command in commands.choices.items()]
    script = _SCRIPT.format(
        commands=" ".join([*commands.choices, *_long_options(parser).split()]), cases="\n".join(cases)
    )
    return f"autoload -U +X bashcompinit && bashcompinit\n{script}" if shell == "zsh" else script


def _long_options(parser: argparse.ArgumentParser) -> str:
    return " ".join(text for action in parser._actions for text in action.option_strings if text.startswith("--"))
