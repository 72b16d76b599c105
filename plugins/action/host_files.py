# Copyright: kvfleet contributors
# Apache License 2.0
"""The controller's half of the module host_files: templates become contents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.template import generate_ansible_template_vars, trust_as_template


class ActionModule(ActionBase):  # type: ignore[misc]
    """Renders what ansible.builtin.template would render, and calls the module once for all files.

    The lookup ``template`` could do that too, but copies all variables for every template, those about the other hosts
    of the fleet included.
    """

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Render, then run the module."""
        super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        arguments["rendered"] = True
        arguments["files"] = [self.content_of(dict(file), task_vars or {}) for file in arguments.get("files") or []]
        answer: dict[str, Any] = self._execute_module(
            module_name="host_files", module_args=arguments, task_vars=task_vars
        )
        return answer

    def content_of(self, file: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:
        """The file with its content in place of its template."""
        source = file.pop("template", None)
        extra = file.pop("variables", None) or {}
        if source is None:
            return file
        if "content" in file or not Path(source).is_file():
            why = "has a content too" if "content" in file else "is not there"
            raise AnsibleActionFail(f"The template {source} of {file.get('path')} {why}.")
        values = {**task_vars, **extra}
        values.update(
            {
                name: value
                for name, value in generate_ansible_template_vars(source, source).items()
                if name != "ansible_managed" or name not in task_vars
            }
        )
        folder = str(Path(source).parent)
        text = trust_as_template(self._loader.get_text_file_contents(source))
        templar = self._templar.copy_with_new_env(searchpath=[folder], available_variables=values)
        rendered = templar.template(text, escape_backslashes=False, overrides={"trim_blocks": True})
        file["content"] = "" if rendered is None else str(rendered)
        return file
