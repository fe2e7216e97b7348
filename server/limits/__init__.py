"""Every guard that bounds what one client may cost, in the order in which a request meets them; and those of them that
belong to no other package: large bodies, the retry throttle, the turns of requests, work for clients that left, the
memory of answers, write timeouts, the error rate limit.

Each entry has the guard's name, what it bounds, and what the client gets beyond the bound; below that, the code and its
flags. Without a flag, the bound is a constant of that module. A caller is an API key, or an address that sends none.
`tests/server/limits/test_guards.py` holds modules, names and flags to the code, and `test_told_limits.py` the numbers:
these, and those of docs/operations.md, which tells users the limits.

The connection
  open files          connections, as far as the process's limit of open files has room for      fewer connections
                      them
                      server.listener:raise_file_limit; --max-connections
  connections         connections at once; a new one replaces one whose error is delayed, or     closed, or 503
                      the longest idle
                      server.http.connection:BoundedProtocol; --max-connections
  dead peers          time without an acknowledgement by the client's TCP, be it for data or     closed
                      for keep-alive probes
                      server.listener:listen; --stall-timeout
  idle connections    time until the first request begins; 75 s between two requests             closed
                      server.http.connection:BoundedProtocol, server.serve:KEEP_ALIVE_S; --header-timeout
  head                bytes of request line and headers; time until they are complete            431, 408
                      server.http.connection:BoundedProtocol; --max-header-bytes, --header-timeout
  pipelining          8 requests behind the one that is answered, with 64 KiB of body each       closed
                      server.http.connection:BoundedProtocol

Load
  retry throttle      requests within 25 ms of an early refusal on their connection: 400 a       delay of at most 1 s
                      second in all
                      server.limits.retry_throttle:RetryThrottle
  load shedding       the cost of a request that cannot be admitted: it is refused by its head,  429, 503
                      without a task
                      server.http.early_refusal:EarlyRefusals; those of admission control
  request turns       requests that are started in one turn of the event loop: one, callers by   delay
                      turns
                      server.limits.request_turns:RequestTurns

The API key
  authentication      requests without a valid API key                                           401
                      server.middleware.auth:AuthMiddleware; --api-key, --api-keys-file
  concurrent requests POST requests of one key at once: its `max-concurrent` in the file         429
                      server.auth.key_ring:KeyRing; --api-keys-file

The body
  body                bytes; time until it is complete, extended by 1 s per 16 KiB received      413, 408
                      server.middleware.body_limit:BodyLimitMiddleware; --max-body-bytes, --body-timeout
  late load shedding  the cost of other requests that cannot be admitted: refused before their   429, 503
                      body is read
                      server.routes.generation_route:GenerationRoute; those of admission control
  encoding            compressed bodies, which could expand to any size: none is read            415
                      server.routes.json_route:JsonRoute
  chunk framing       bytes of a chunked body, framing included: at most twice its content and   400
                      the head limit
                      server.http.connection:BoundedProtocol; --max-header-bytes
  large bodies        bodies of 64 KiB and more: 16 in memory, 4 per caller; 4 MiB are parsed    delay, 429 after 30 s
                      per second
                      server.limits.large_bodies:LargeBodies
  JSON                about 1000 levels; 256 fields; in a large body 100,000 lists and objects   400
                      and 2**18 names, or one of each per 16 bytes if that is more
                      server.routes.json_route:JsonRequest
  disconnects         work for a client that leaves before its response begins: it is cancelled  logged as 499
                      server.limits.disconnect:unless_client_leaves

The parameters
  objects             256 fields of an object; 2**17 values of JSON that is passed on; 64        400
                      levels of a tool's schema
                      server.protocol.wire:WireModel, server.protocol.wire:check_size,
                      server.protocol.wire:check_serializable
  stop strings        64 of 1024 characters, 4096 characters together                            400
                      server.protocol.wire:StopStrings
  bad words           256 of 256 characters, 4096 characters together                            400
                      server.protocol.wire:BadWords
  token ids           1024 stop tokens, 1024 logit biases, 2**14 allowed tokens, 2**20 ids to    400
                      detokenize
                      server.protocol.wire:StopTokenIds, server.protocol.wire:LogitBias,
                      server.protocol.wire:AllowedTokenIds, server.protocol.wire:TokenIds
  prompts             2048 prompts, 2**20 token ids in each                                      400
                      server.protocol.prompts:parse_prompts
  messages            2**14 messages, 1024 parts and 128 calls in each, 2**14 of both together;  400
                      2**17 values in arguments
                      server.protocol.messages:bounded_parts, server.protocol.messages:MAX_PARTS,
                      server.protocol.messages:MAX_TOOL_CALLS
  tools               4096 tools, 2**20 characters of them as JSON                               400
                      server.protocol.tools:ToolParams
  structured output   8192 choices; 2**20 characters of a schema that is written as a string     400
                      server.protocol.structured:StructuredOutputs
  choices             128 as `n` or `best_of`                                                    400
                      server.protocol.generation:GenerationParams, server.protocol.completions:CompletionRequest
  logprobs            20 `top_logprobs` of chat and Responses; 100 `logprobs` of completions     400
                      and `prompt_logprobs`
                      server.protocol.chat:ChatRequest, server.protocol.responses:ResponsesRequest,
                      engine.core.sampling_params:SamplingParams
  metadata            16 entries of `metadata`, 16 of `include`                                  400
                      server.protocol.responses:ResponsesRequest
  context edits       16 edits of `context_management`                                           400
                      server.protocol.anthropic_context:MAX_EDITS
  salts and ids       1024 characters of `cache_salt` and of `prompt_cache_key`, 128 of a        400
                      request id (in a header it is replaced)
                      server.protocol.request:RequestFields, server.core.request_record:is_sane_request_id,
                      server.protocol.cache_steering:MAX_CACHE_KEY
  cache keys          1000 keys in one answer of /v1/cache                                       `has_more`
                      server.routes.cache:MAX_KEYS
  retained prompts    a share of all KV blocks, in which a key displaces its own first           nothing
                      engine.scheduling.retention:Retention; --prefix-retention-share
  typo hints          8 unknown fields are compared with known ones, if they have at most 64     no hint
                      characters
                      server.protocol.refusals:find_typo

The prompt and the grammar
  request templates   chat templates of requests: two processes at once, each with 5 s, 2 s of   400, delay
                      CPU time and 1 GiB
                      server.templates.render:ChatRenderer, engine.text.template_sandbox:render_isolated;
                      --trust-request-chat-template
  template trial      the server's templates at start: 2 s of CPU time, 512 MiB and 2**20        no chats
                      characters of source, in a process of its own
                      server.templates.trial:try_template
  server's template   5 s and 2**24 characters of output                                         400
                      engine.text.chat_template:ChatTemplate
  tokenizing          text of eight contexts; a longer one is refused before all of it is        400
                      tokenized
                      engine.text.tokenizer:Tokenizer, server.runtime.backend:MAX_CONTEXTS; --max-model-len
  grammar size        128 KiB of a grammar, 100 levels of a schema                               400
                      engine.grammar.lark:to_lark, engine.grammar.json_schema:check_schema
  grammar translation one grammar at a time, callers in turn                                     delay
                      engine.grammar.checker:GrammarChecker
  new grammars        16 unchecked grammars per caller at once, checked one after the other;     delay, 429
                      those of four callers at once, others in turn
                      engine.grammar.checker:GrammarChecker
  grammar checks      5 s, 128 MiB, 4 MiB of stack in a process of its own; 0.2 s of CPU time    400
                      to generate on trial
                      engine.grammar.checker:GrammarChecker, engine.grammar.checker_process:find_fault
  sequences           prompts x choices, and their prompt tokens together, that the admission    400
                      queue could ever hold
                      server.generation.plan:make_plan, server.runtime.backend:AdmissionSize; --max-num-seqs,
                      --max-waiting, --max-waiting-tokens
  fan-out             2**19 ids of allowed, bad and predicted tokens, 2**22 logprobs, over all        400
                      sequences of a request
                      server.generation.plan:make_plan
  answer memory       bytes for answers that are not streamed, together: of logprobs, of all      429, 400
                      sequences or vectors but one, of tokens; half is kept for callers by weight
                      server.limits.answer_memory:AnswerMemory; --answer-memory-bytes, --fair-by
  embeddings          inputs of one request in the engine at once: 32, with 2048 tokens          delay
                      server.generation.embeddings:embed
  context             prompt tokens and `max_tokens` together; also the tokens that wait for a   400
                      slow reader
                      engine.core.request_validation:check_request; --max-model-len

The engine
  admission control   requests that wait, their prompt tokens, and the predicted wait            429, 503 in a restart
                      engine.client.admission:AdmissionControl; --max-num-seqs, --max-waiting, --max-waiting-tokens,
                      --max-queue-time
  tenant quotas       places and tokens to wait that one API key, or one address, may take:      429
                      half is kept for keys by weight
                      engine.client.tenant_quotas:TenantQuotas; --api-key, --api-keys-file, --fair-by
  queue time          the real wait to be scheduled, also while the engine restarts              408
                      engine.client.request_timeouts:RequestTimeouts; --max-queue-time
  fair queue          tokens of one API key, or one address, while others wait, by weight        delay
                      engine.scheduling.fair_queue:FairQueue; --api-key, --api-keys-file, --fair-by
  prefill budget      prompt tokens per step, so that streams of others keep their token rate    delay
                      engine.scheduling.prefill_budget:PrefillPace; --target-itl-ms, --max-prefill-tokens-per-gap,
                      --max-num-batched-tokens
  grammar compiling   one grammar at a time; its seconds are shared by the keys' weights         delay
                      engine.grammar.compiler:GrammarQueue; --api-key, --api-keys-file
  grammar following   0.2 s and 5 ms per token of CPU time in the engine's steps; 32             400, or error event
                      recompilations
                      engine.grammar.matcher:Matcher
  poison requests     crashes of the engine by one request: two alone in it, or three kills      500, or error event
                      engine.process.poison_requests:PoisonRequests
  inspection          questions of /v1/requests to the engine: one at a time, 2 s each; 1000     less detail
                      sequences
                      engine.client.request_inspector:RequestInspector, server.routes.requests:MAX_SEQUENCES

The response
  tool call parsing   2**16 characters of output that may still become a tool call               plain text
                      server.tools.incremental_text:IncrementalText
  encoding in slices  time for which the encoding of a large response blocks the event loop      nothing
                      server.core.chunked_json:json_slices
  answers in pieces   bytes of an answer that is not streamed beyond what its client has read:   delay
                      256 KiB
                      server.generation.whole_answer:answer_of
  write timeout       time for which the client of a stream, or of an answer in pieces, may      closed
                      read nothing
                      server.limits.write_timeout:WriteTimeout, server.generation.sse:EventStream; --stall-timeout
  error rate limit    4xx responses per caller: 128 at once, then 200 a second; 2048 delayed     delay, 429, closed
                      ones in all
                      server.limits.error_rate_limit:ErrorRateLimit
  lingering           the rest of a refused request: it is read for 2 s                          closed
                      server.http.connection:BoundedProtocol
  metric labels       series of metrics: paths and methods are counted under their route, keys   nothing
                      under their name
                      server.middleware.access:report_request
  drain               time for which running requests hold up a shutdown                         error event, 503
                      server.runtime.lifecycle:Lifecycle; --shutdown-timeout
"""
