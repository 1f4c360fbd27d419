/* Run GGUF language models from C. docs/c.md has an introduction.
 *
 * Made by cbindgen of crates/metal-attention-c/src: what is changed here is lost. */

#ifndef METAL_ATTENTION_H
#define METAL_ATTENTION_H

#include <stddef.h>
#include <stdint.h>

// In the place of a text's length: it ends with a NUL.
#define MA_NUL_TERMINATED SIZE_MAX

// The version of this interface. It is raised by each change after which programs have to be compiled again.
#define MA_ABI_VERSION 2



// The id of text without a token: the rest of a text, which was held back until its end.
#define MA_NO_TOKEN UINT32_MAX

// The result of a call. After all but OK, ma_last_error has a message.
typedef enum {
  // The call succeeded.
  MA_STATUS_OK = 0,
  // An argument is invalid: a null pointer, a string that is no UTF-8, a number outside its range, the wrong size of a
  // struct.
  MA_STATUS_INVALID_ARGUMENT = 1,
  // A buffer is too small. The needed size was written to the argument for the length.
  MA_STATUS_BUFFER_TOO_SMALL = 2,
  // The prompt does not fit into the context.
  MA_STATUS_CONTEXT_FULL = 3,
  // The context, or the batch, is in use by another call.
  MA_STATUS_BUSY = 4,
  // The call was cancelled: by ma_context_cancel or ma_batch_cancel.
  MA_STATUS_CANCELLED = 5,
  // The file is missing or damaged, or the model is not supported.
  MA_STATUS_MODEL = 6,
  // The device is not available, or failed.
  MA_STATUS_DEVICE = 7,
  // There is not enough memory.
  MA_STATUS_OUT_OF_MEMORY = 8,
  // The model cannot do it: it generates no text, or makes no embeddings.
  MA_STATUS_UNSUPPORTED = 9,
  // Anything else.
  MA_STATUS_FAILED = 10,
  // A bug of this library. The objects of the call should be freed.
  MA_STATUS_DEFECT = 11,
} ma_status;

// The reason why a text ended.
typedef enum {
  // The model ended it.
  MA_STOP_REASON_END_OF_GENERATION = 0,
  // max_tokens were generated.
  MA_STOP_REASON_LENGTH = 1,
  // A stop string was generated.
  MA_STOP_REASON_STOP_STRING = 2,
  // The context is full.
  MA_STOP_REASON_CONTEXT_FULL = 3,
  // The callback ended it.
  MA_STOP_REASON_CALLBACK = 4,
} ma_stop_reason;

// The answer to a conversation, which the library splits into thoughts, text and tool calls while it is generated. Set it as the
// member `answer` of ma_generate_options. An answer is for one generation.
typedef struct ma_answer ma_answer;

// A model that generates many sequences at once. Prompts with a common beginning share its KV cache.
typedef struct ma_batch ma_batch;

// A conversation, rendered by the model's chat template. Any number of threads may use it at once.
typedef struct ma_chat ma_chat;

// A model on its device, with the KV cache of one sequence at a time. It may be used by one call at a time: a call while another
// one runs returns MA_STATUS_BUSY.
typedef struct ma_context ma_context;

// A grammar that constrains generated text: the member `grammar` of ma_generate_options. Any number of generations may use it at
// once; each begins at its start.
typedef struct ma_grammar ma_grammar;

// An open model. Any number of threads may use it at once.
typedef struct ma_model ma_model;

// The settings of a context. ma_context_options_default sets all members.
typedef struct {
  // The size of this struct in bytes.
  size_t size;
  // The device: "auto", "cpu", "cuda", "cuda:1", "wgpu", "wgpu:1" by index, "wgpu:NAME". Null: "auto", a GPU in which the model
  // fits, preferably through CUDA, else the CPU.
  const char *device;
  // The length of the context in tokens. 0: as long as the model was trained with, at most 4096.
  size_t n_ctx;
  // The number of threads that compute on the CPU. 0: one for each physical core.
  size_t n_threads;
  // The largest number of tokens of a micro-batch, which go through the layers at once. 0: the device's default.
  size_t n_ubatch;
  // Not 0: compute in F32 throughout, which is slower and more exact.
  int32_t exact;
} ma_context_options;

// The settings for rendering a conversation. ma_chat_options_default sets all members.
typedef struct {
  // The size of this struct in bytes.
  size_t size;
  // The functions that the model may call: a JSON list of OpenAI's tools, with a NUL at its end. Null: none.
  const char *tools;
  // Variables of the template, such as {"enable_thinking": false}: a JSON object, with a NUL at its end. Null: none.
  const char *variables;
  // A template in Jinja that replaces the model's, with a NUL at its end. Null: the model's; for a model without one, lines that begin
  // with "User:".
  const char *chat_template;
  // Not 0: the prompt ends with the beginning of an answer.
  int32_t add_generation_prompt;
  // Not 0: the answer continues the last message, which is the assistant's.
  int32_t continue_final_message;
} ma_chat_options;

// A number that is added to the logit of a token.
typedef struct {
  // The token's id.
  uint32_t id;
  // The number; minus infinity forbids the token.
  float bias;
} ma_logit_bias;

// The options of the sampler. ma_sampling_options_default sets all members, with the values and the order of llama.cpp's samplers.
typedef struct {
  // The size of this struct in bytes.
  size_t size;
  // Not 0: random numbers are those of `seed`; 0: they differ each time.
  int32_t has_seed;
  // Divides the logits; 0 chooses the most probable token.
  float temperature;
  // The seed; the same seed gives the same text.
  uint64_t seed;
  // Keeps this many of the most probable tokens; 0: all.
  size_t top_k;
  // Keeps the most probable tokens up to this total probability; 1: all.
  float top_p;
  // Keeps tokens whose probability is at least this share of the largest one; 0: all.
  float min_p;
  // Keeps the most typical tokens up to this total probability; 1: all.
  float typical_p;
  // Keeps logits within this many standard deviations of the highest; 0 or less: all.
  float top_n_sigma;
  // The smallest number of tokens that top_p, min_p, typical_p and XTC keep.
  size_t min_keep;
  // The probability, from 0 to 1, that XTC removes the most probable tokens.
  float xtc_probability;
  // The probability that a token must have for XTC to remove it.
  float xtc_threshold;
  // Half the width of the interval of temperatures from which entropy chooses one; 0: off.
  float dynatemp_range;
  // The power of the entropy in this choice.
  float dynatemp_exponent;
  // The number of last tokens that the next three penalties consider; SIZE_MAX: all.
  size_t penalty_last_n;
  // Divides the positive logits of tokens that occurred; 1: off.
  float repeat_penalty;
  // Subtracted from a token's logit for each occurrence.
  float frequency_penalty;
  // Subtracted from a token's logit if it occurred.
  float presence_penalty;
  // The penalty of the shortest repetition that DRY penalises; 0: off.
  float dry_multiplier;
  // The factor by which DRY's penalty grows with each further token.
  float dry_base;
  // The length from which on DRY penalises repetitions.
  size_t dry_allowed_length;
  // The number of last tokens that DRY considers; SIZE_MAX: all.
  size_t dry_penalty_last_n;
  // Strings that end a repetition for DRY; each ends with a NUL. Null: line breaks, colons, quotation marks and asterisks; not
  // null, with a number of 0: none.
  const char *const *dry_sequence_breakers;
  // The number of these strings.
  size_t n_dry_sequence_breakers;
  // The samplers in their order, such as "penalties;top_k;temperature", with a NUL at its end. Null: all, in the default order.
  const char *samplers;
  // Numbers that are added to logits.
  const ma_logit_bias *logit_bias;
  // The number of these.
  size_t n_logit_bias;
} ma_sampling_options;

// The end and the form of the generated text. ma_generate_options_default sets all members.
typedef struct {
  // The size of this struct in bytes.
  size_t size;
  // The largest number of tokens to generate; SIZE_MAX: until the model ends the text, or the context is full.
  size_t max_tokens;
  // Strings that end the text; each ends with a NUL. They are not part of the text.
  const char *const *stop;
  // The number of these strings.
  size_t n_stop;
  // Ids of tokens that end the text, in addition to those of the vocabulary. They are not part of the text.
  const uint32_t *stop_ids;
  // The number of these ids.
  size_t n_stop_ids;
  // The number of tokens before which no token that ends the text is chosen.
  size_t min_tokens;
  // Not 0: never choose a token by which the vocabulary ends a text.
  int32_t ignore_eos;
  // The grammar that the text follows. Null: the text is not constrained.
  const ma_grammar *grammar;
  // The answer that reads the text, which answers its conversation. Null: none. It may be freed before the call is over.
  const ma_answer *answer;
} ma_generate_options;

// A generated token. It is valid until the callback returns.
typedef struct {
  // The token's id, or MA_NO_TOKEN.
  uint32_t id;
  // The text that became final by this token, in UTF-8, with a NUL at its end: whole characters, and nothing that may be the
  // beginning of a stop string. May be empty.
  const char *text;
  // Its length in bytes, without the NUL.
  size_t length;
} ma_token;

// The callback for each token; `user` is the caller's argument. Any result but 0 ends the text. It must not leave by an
// exception or longjmp.
typedef int32_t (*ma_on_token)(const ma_token *token,
                               void *user);

// The result of a generation.
typedef struct {
  // The number of tokens of the prompt.
  size_t n_prompt;
  // The number of those that were still in the KV cache and were not evaluated again.
  size_t n_cached;
  // The number of generated tokens.
  size_t n_generated;
  // The reason why the text ended.
  ma_stop_reason stop_reason;
} ma_generation;

// The result of one sequence of a batch.
typedef struct {
  // MA_STATUS_OK: it was generated. Otherwise ma_batch_error has a message, and `generation` is the state at the error.
  ma_status status;
  // The numbers of tokens, and the reason why it ended. `n_cached` is 0 if the callback ended it.
  ma_generation generation;
} ma_batch_result;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The version of the interface that the library was built with; MA_ABI_VERSION is that of the program's header.
uint32_t ma_abi_version(void);

// The library's version, such as "0.1.0".
const char *ma_version(void);

// The message of the last call of this thread that failed: one line of UTF-8, empty if none has failed. It is valid until
// another call of this thread fails.
const char *ma_last_error(void);

// Opens the GGUF file at `path`, any part of a split one, and writes the model to `model`. Free it by ma_model_free.
//
// # Safety
// `path` is null or ends with a NUL; `model` is null or points to memory for a pointer.
ma_status ma_model_open(const char *path,
                        ma_model **model);

// Opens the small model that is part of the library, which tells short stories for children, for a first try. Free it by
// ma_model_free.
//
// # Safety
// `model` is null or points to memory for a pointer.
ma_status ma_model_built_in(ma_model **model);

// Frees a model. Contexts that were made of it can still be used. Null is allowed.
//
// # Safety
// `model` is null or comes from ma_model_open or ma_model_built_in, and is not used after this.
void ma_model_free(ma_model *model);

// The size of the vocabulary; 0 for a null pointer.
//
// # Safety
// `model` is null or a model.
size_t ma_model_n_vocab(const ma_model *model);

// The context that the model was trained with, in tokens; 0 for a null pointer.
//
// # Safety
// `model` is null or a model.
size_t ma_model_n_ctx_train(const ma_model *model);

// Writes the tokens of a text to `ids`, and their number to `n_ids`.
//
// `length` is in bytes, or MA_NUL_TERMINATED. If `add_special` is not 0, the tokens that the model expects around a text (BOS, EOS)
// are added, as prompts need them. If `parse_special` is not 0, the names of control tokens in the text become these tokens. If
// there are more tokens than `capacity` (a null `ids` has room for none), the result is MA_STATUS_BUFFER_TOO_SMALL and only `n_ids`
// is written.
//
// # Safety
// Pointers are null or point to what is described here; `ids` to memory for `capacity` ids.
ma_status ma_tokenize(const ma_model *model,
                      const char *text,
                      size_t length,
                      int32_t add_special,
                      int32_t parse_special,
                      uint32_t *ids,
                      size_t capacity,
                      size_t *n_ids);

// Writes the text of tokens to `text`, without a NUL at its end, and its length in bytes to `length`.
//
// Control tokens are left out, unless `special` is not 0. Bytes that are no whole character become U+FFFD. If the text is longer
// than `capacity` (a null `text` has room for nothing), the result is MA_STATUS_BUFFER_TOO_SMALL and only `length` is written.
//
// # Safety
// Pointers are null or point to what is described here; `ids` to `n_ids` ids, `text` to memory for `capacity` bytes.
ma_status ma_detokenize(const ma_model *model,
                        const uint32_t *ids,
                        size_t n_ids,
                        int32_t special,
                        char *text,
                        size_t capacity,
                        size_t *length);

// Sets all members of `options`; `size` is sizeof(ma_context_options).
//
// # Safety
// `options` is null or points to memory for `size` bytes.
ma_status ma_context_options_default(ma_context_options *options,
                                     size_t size);

// Prepares a model to run and writes the context to `context`. Free it by ma_context_free. Null `options` stand for the
// defaults.
//
// This takes a moment for a large model: weights are repacked for the device, and the KV cache is allocated.
//
// # Safety
// Pointers are null or point to what is described here.
ma_status ma_context_new(const ma_model *model,
                         const ma_context_options *options,
                         ma_context **context);

// Frees a context. Null is allowed.
//
// # Safety
// `context` is null or comes from ma_context_new; no call uses it, now or after this.
void ma_context_free(ma_context *context);

// The length of the context in tokens, for prompt and generated text together; 0 for a null pointer, and while another call
// runs.
//
// # Safety
// `context` is null or a context.
size_t ma_context_n_ctx(const ma_context *context);

// Cancels the call that runs on the context, from another thread: it soon returns MA_STATUS_CANCELLED. Calls that begin later
// are not affected.
//
// # Safety
// `context` is null or a context.
void ma_context_cancel(const ma_context *context);

// Sets all members of `options`; `size` is sizeof(ma_chat_options).
//
// # Safety
// `options` is null or points to memory for `size` bytes.
ma_status ma_chat_options_default(ma_chat_options *options,
                                  size_t size);

// Renders a conversation by the model's chat template, and writes it to `chat`. Free it by ma_chat_free.
//
// `messages` is a JSON list of OpenAI's messages, such as [{"role": "user", "content": "Hello!"}]; its `length` is in bytes, or
// MA_NUL_TERMINATED. Null `options` stand for the defaults. Names of control tokens within messages remain text.
//
// # Safety
// Pointers are null or point to what is described here; `messages` to `length` bytes.
ma_status ma_chat_new(const ma_model *model,
                      const char *messages,
                      size_t length,
                      const ma_chat_options *options,
                      ma_chat **chat);

// Frees a conversation. Grammars and answers that were made of it can still be used. Null is allowed.
//
// # Safety
// `chat` is null or comes from ma_chat_new, and is not used after this.
void ma_chat_free(ma_chat *chat);

// Writes the text of the prompt to `text`, without a NUL at its end, and its length in bytes to `length`.
//
// If the text is longer than `capacity` (a null `text` has room for nothing), the result is MA_STATUS_BUFFER_TOO_SMALL and only
// `length` is written. Generate from the tokens of ma_chat_tokens, not from this text: in them the names of control tokens within
// messages are text.
//
// # Safety
// Pointers are null or point to what is described here; `text` to memory for `capacity` bytes.
ma_status ma_chat_prompt(const ma_chat *chat,
                         char *text,
                         size_t capacity,
                         size_t *length);

// Writes the tokens of the prompt to `ids`, and their number to `n_ids`.
//
// If there are more tokens than `capacity` (a null `ids` has room for none), the result is MA_STATUS_BUFFER_TOO_SMALL and only
// `n_ids` is written.
//
// # Safety
// Pointers are null or point to what is described here; `ids` to memory for `capacity` ids.
ma_status ma_chat_tokens(const ma_chat *chat,
                         uint32_t *ids,
                         size_t capacity,
                         size_t *n_ids);

// Makes an empty answer to `chat`, which a call that generates fills, and writes it to `answer`. Free it by ma_answer_free.
//
// # Safety
// Pointers are null or point to what is described here.
ma_status ma_answer_new(const ma_chat *chat,
                        ma_answer **answer);

// Writes the answer, as far as it has been generated, to `message`, without a NUL at its end, and its length in bytes to `length`. It is
// OpenAI's message in JSON, with `content`, `reasoning_content` and `tool_calls`, and can be added to the conversation. An incomplete
// tool call is left out.
//
// If the message is longer than `capacity` (a null `message` has room for nothing), the result is MA_STATUS_BUFFER_TOO_SMALL and only
// `length` is written.
//
// # Safety
// Pointers are null or point to what is described here; `message` to memory for `capacity` bytes.
ma_status ma_answer_message(const ma_answer *answer,
                            char *message,
                            size_t capacity,
                            size_t *length);

// Frees an answer. Null is allowed.
//
// # Safety
// `answer` is null or comes from ma_answer_new, and the caller does not use it after this.
void ma_answer_free(ma_answer *answer);

// Compiles a grammar of `form`, and writes it to `grammar`. Free it by ma_grammar_free.
//
// `kind`, with a NUL at its end, is the kind of `form`, whose `length` is in bytes, or MA_NUL_TERMINATED:
// "json_schema", a JSON schema; "json_object", any JSON object; "grammar", llama.cpp's GBNF or llguidance's Lark; "regex", a regular
// expression that matches the whole text; "choice", a JSON list of strings of which the text is one; "tool_call" and "tool_calls", one
// call, or one or more, of the tools of `chat`. `form` may be null for the kinds that need none.
//
// `chat` is null, or the conversation that the text answers: then the model's thoughts, which come first, are not constrained.
//
// # Safety
// Pointers are null or point to what is described here; `form` to `length` bytes.
ma_status ma_grammar_new(const ma_model *model,
                         const char *kind,
                         const char *form,
                         size_t length,
                         const ma_chat *chat,
                         ma_grammar **grammar);

// Writes the parts of a JSON schema that the grammar does not enforce to `places`, without a NUL at its end, and its length in bytes to
// `length`: a JSON list of strings, which is mostly empty.
//
// If the list is longer than `capacity` (a null `places` has room for nothing), the result is MA_STATUS_BUFFER_TOO_SMALL and only
// `length` is written.
//
// # Safety
// Pointers are null or point to what is described here; `places` to memory for `capacity` bytes.
ma_status ma_grammar_left_out(const ma_grammar *grammar,
                              char *places,
                              size_t capacity,
                              size_t *length);

// Frees a grammar. Generations that use it continue. Null is allowed.
//
// # Safety
// `grammar` is null or comes from ma_grammar_new, and is not used after this.
void ma_grammar_free(ma_grammar *grammar);

// Sets all members of `options`; `size` is sizeof(ma_sampling_options).
//
// # Safety
// `options` is null or points to memory for `size` bytes.
ma_status ma_sampling_options_default(ma_sampling_options *options,
                                      size_t size);

// Like ma_sampling_options_default, but always chooses the token with the highest logit.
//
// # Safety
// `options` is null or points to memory for `size` bytes.
ma_status ma_sampling_options_greedy(ma_sampling_options *options,
                                     size_t size);

// Sets all members of `options`; `size` is sizeof(ma_generate_options).
//
// # Safety
// `options` is null or points to memory for `size` bytes.
ma_status ma_generate_options_default(ma_generate_options *options,
                                      size_t size);

// Continues the tokens of `prompt`, which include those that the model expects around a text (see ma_tokenize), and calls `on_token`
// for each new one. Tokens of the prompt that are still in the KV cache are not evaluated again.
//
// Null `sampling` stands for the values that the model's file recommends, null `options` for the defaults; `on_token` and
// `generation` may be null. Before a call fails, `on_token` may have been called for some tokens.
//
// # Safety
// Pointers are null or point to what is described here; `prompt` to `n_prompt` ids. `on_token` is null or a function of its type.
ma_status ma_generate(const ma_context *context,
                      const uint32_t *prompt,
                      size_t n_prompt,
                      const ma_sampling_options *sampling,
                      const ma_generate_options *options,
                      ma_on_token on_token,
                      void *user,
                      ma_generation *generation);

// Like ma_generate, with a text as prompt: its `length` is in bytes, or MA_NUL_TERMINATED. The tokens that the model expects around
// a text are added.
//
// # Safety
// Pointers are null or point to what is described here; `prompt` to `length` bytes. `on_token` is null or a function of its type.
ma_status ma_complete(const ma_context *context,
                      const char *prompt,
                      size_t length,
                      const ma_sampling_options *sampling,
                      const ma_generate_options *options,
                      ma_on_token on_token,
                      void *user,
                      ma_generation *generation);

// Prepares a model to generate up to `n_parallel` sequences at once, and writes the batch to `batch`. Free it by ma_batch_free. Null
// `options` stand for the defaults; their `n_ctx` is that of each sequence.
//
// # Safety
// Pointers are null or point to what is described here.
ma_status ma_batch_new(const ma_model *model,
                       const ma_context_options *options,
                       size_t n_parallel,
                       ma_batch **batch);

// Adds a sequence to the batch, which continues the tokens of `prompt`, with the arguments of ma_generate. Its index in the results of
// the next ma_batch_run is written to `index`, unless that is null. `on_token` is called by ma_batch_run, in its thread.
//
// # Safety
// Pointers are null or point to what is described here; `prompt` to `n_prompt` ids. `on_token` is null or a function of its type, and
// may be called with `user` in the thread of ma_batch_run, until that returns.
ma_status ma_batch_add(const ma_batch *batch,
                       const uint32_t *prompt,
                       size_t n_prompt,
                       const ma_sampling_options *sampling,
                       const ma_generate_options *options,
                       ma_on_token on_token,
                       void *user,
                       size_t *index);

// Generates all sequences that were added, writes the result of each to `results`, in the order in which they were added, and their
// number to `n`. The batch is then empty and can be filled again.
//
// An error of one sequence does not affect the others; its result has the status. If there are more sequences than `capacity` (null
// `results` have room for none), the call returns MA_STATUS_BUFFER_TOO_SMALL and the sequences remain. After ma_batch_cancel it
// returns MA_STATUS_CANCELLED and `results` are written nevertheless. While another ma_batch_run runs, it returns MA_STATUS_BUSY.
//
// # Safety
// Pointers are null or point to what is described here; `results` to memory for `capacity` of them.
ma_status ma_batch_run(const ma_batch *batch,
                       ma_batch_result *results,
                       size_t capacity,
                       size_t *n);

// The error of the sequence `index` of the last ma_batch_run: one line of UTF-8, empty if it has none, or if there is no such
// sequence. It is valid until the next ma_batch_run or ma_batch_free.
//
// # Safety
// `batch` is null or a batch.
const char *ma_batch_error(const ma_batch *batch,
                           size_t index);

// Ends the ma_batch_run that runs, from another thread or from a callback: sequences that are not over are MA_STATUS_CANCELLED.
//
// # Safety
// `batch` is null or a batch.
void ma_batch_cancel(const ma_batch *batch);

// Frees a batch and cancels its sequences. Null is allowed.
//
// # Safety
// `batch` is null or comes from ma_batch_new; no call uses it, now or after this.
void ma_batch_free(ma_batch *batch);

// The number of elements of the embeddings of ma_embed; 0 for a null pointer.
//
// # Safety
// `model` is null or a model.
size_t ma_model_n_embedding(const ma_model *model);

// Writes the embedding of a text to `embedding`, and its number of elements to `n`: the hidden states of its tokens, pooled in the
// way that the model's file gives, with length 1. `length` is in bytes, or MA_NUL_TERMINATED. The context's sequence is discarded.
//
// If there are more elements than `capacity`, the result is MA_STATUS_BUFFER_TOO_SMALL and only `n` is written; ma_model_n_embedding
// returns their number.
//
// # Safety
// Pointers are null or point to what is described here; `text` to `length` bytes, `embedding` to memory for `capacity` elements.
ma_status ma_embed(const ma_context *context,
                   const char *text,
                   size_t length,
                   float *embedding,
                   size_t capacity,
                   size_t *n);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* METAL_ATTENTION_H */
