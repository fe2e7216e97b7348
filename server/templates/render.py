"""A conversation -> its prompt, as text and token ids."""

import asyncio
from collections.abc import Mapping
from functools import cached_property, partial

from engine.core.errors import InvalidParameterError
from engine.text.chat_template import ChatTemplate, Conversation
from engine.text.template_sandbox import render_isolated
from server.core.errors import BadRequestError
from server.core.prompts import EncodedPrompt
from server.core.tokenizer_protocol import Tokenizer
from server.protocol.chat import ConversationParams
from server.templates.late_system import as_user_text
from server.templates.message_shaping import TemplateCapabilities, in_parts, shape_messages
from server.templates.trial import render_probe, try_template
from server.tools.formats import JSON
from server.tools.model_format import Dialect, DialectSettings
from server.tools.prompt_fallback import calls_as_text, describe_tools

MAX_ISOLATED = 2
"""Maximum number of requests' own templates that render at once: each takes a process."""


class ChatRenderer:
    """Renders with the server's template, or with a request's own where that is trusted."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None = None,
        trusts_requests: bool = False,
        dialects: DialectSettings | None = None,
    ) -> None:
        """`template` replaces those of the checkpoint."""
        self._tokenizer = tokenizer
        self._dialects = dialects or DialectSettings()
        self._trusts_requests = trusts_requests
        self._isolated = asyncio.Semaphore(MAX_ISOLATED)
        sources = tokenizer.chat_templates if template is None else {"default": template}
        self._templates = {
            name: _ServerTemplate(sources[name], tokenizer.named_tokens, self._dialects)
            for name in ("default", "tool_use")
            if name in sources
        }

    async def load(self) -> None:
        """Compiles and probes the templates, which the first request would have to wait for, after a trial of each in a
        process with limits. Raises InvalidParameterError for the first one that is not valid, or takes too much."""
        refusals = await asyncio.gather(*(template.load() for template in self._templates.values()))
        for refusal in filter(None, refusals):
            raise refusal

    @property
    def server_dialect(self) -> Dialect | None:
        """How the model writes calls and thinking when prompted with the server's template that takes tools; None
        without a template."""
        template = self._templates.get("tool_use", self._templates.get("default"))
        return None if template is None else template.dialect

    def dialect_for(self, params: ConversationParams) -> Dialect:
        """Returns how the model writes calls and thinking when prompted with the template that `encode` uses."""
        if params.chat_template is not None:
            return self._dialects.dialect_of(params.chat_template)
        return self._template_for(params).dialect

    async def encode(self, params: ConversationParams) -> EncodedPrompt:
        """Returns the prompt, made off the event loop: templates and texts may be long. Raises BadRequestError or
        InvalidParameterError."""
        if params.chat_template is None:
            return await asyncio.to_thread(self._encode, params)
        if not self._trusts_requests:
            message = "chat_template is refused: this server runs without --trust-request-chat-template."
            raise BadRequestError(message, "chat_template")
        async with self._isolated:
            return await self._encode_isolated(params, params.chat_template)

    def render(self, params: ConversationParams) -> str:
        """Returns the text that the server's template makes. Raises BadRequestError or InvalidParameterError."""
        template = self._template_for(params)
        return template.render(_conversation(params, template.capabilities, self.dialect_for(params)))

    def _template_for(self, params: ConversationParams) -> "_ServerTemplate":
        default = self._templates.get("default")
        template = default if params.template_tools is None else self._templates.get("tool_use", default)
        if template is None:
            message = "This model has no chat template: start the server with --chat-template, or use /v1/completions."
            raise BadRequestError(message, "messages")
        return template

    def _encode(self, params: ConversationParams) -> EncodedPrompt:
        return self._encode_text(self.render(params), params)

    async def _encode_isolated(self, params: ConversationParams, source: str) -> EncodedPrompt:
        capabilities, dialect = TemplateCapabilities.from_source(source), self.dialect_for(params)
        conversation = await asyncio.to_thread(_conversation, params, capabilities, dialect)
        text = await render_isolated(source, conversation, self._tokenizer.named_tokens)
        return await asyncio.to_thread(self._encode_text, text, params)

    def _encode_text(self, text: str, params: ConversationParams) -> EncodedPrompt:
        return EncodedPrompt(self._tokenizer.encode(text, params.add_special_tokens), text)


class _ServerTemplate:
    """A template of the server, compiled and probed when it is loaded or first used."""

    def __init__(self, source: str, named_tokens: Mapping[str, str], dialects: DialectSettings) -> None:
        self.source = source
        self._named_tokens = named_tokens
        self._dialects = dialects
        self._refusal: InvalidParameterError | None = None
        """Why the template is never run in this process."""

    async def load(self) -> InvalidParameterError | None:
        """Returns why the template is refused, now and whenever it is asked for; None if it can be used."""
        try:
            await try_template(self.source, self._named_tokens, self._dialects)
            await asyncio.to_thread(lambda: (self.capabilities, self.dialect))
        except InvalidParameterError as error:
            self._refusal = error
        return self._refusal

    def render(self, conversation: Conversation) -> str:
        return self._template.render(conversation, self._named_tokens)

    @cached_property
    def capabilities(self) -> TemplateCapabilities:
        return TemplateCapabilities.from_probes(self._template, self._named_tokens)

    @cached_property
    def dialect(self) -> Dialect:
        return self._dialects.dialect_of(self.source, partial(render_probe, self._template, self._named_tokens))

    @cached_property
    def _template(self) -> ChatTemplate:
        if self._refusal is not None:
            raise InvalidParameterError("chat_template", str(self._refusal))
        return ChatTemplate(self.source)


def _conversation(params: ConversationParams, capabilities: TemplateCapabilities, dialect: Dialect) -> Conversation:
    spelling = (dialect.calls or JSON).spelling
    messages, tools = shape_messages(params.messages, capabilities), params.template_tools
    if not capabilities.supports_late_system_role:
        messages = as_user_text(messages)
    if not capabilities.supports_tool_calls:
        messages = calls_as_text(messages, spelling)
    if tools is not None and not capabilities.supports_tools:
        messages, tools = describe_tools(messages, tools, spelling, capabilities.supports_system_role), None
    return Conversation(
        messages=in_parts(messages, capabilities),
        tools=tools,
        documents=params.documents,
        add_generation_prompt=params.opens_turn,
        continue_final_message=params.continue_final_message,
        variables=params.template_variables,
    )
