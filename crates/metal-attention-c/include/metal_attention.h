/* Run GGUF language models from C. docs/c.md has an introduction.
 *
 * Made by cbindgen of crates/metal-attention-c/src: what is changed here is lost. */

#ifndef METAL_ATTENTION_H
#define METAL_ATTENTION_H

#include <stddef.h>
#include <stdint.h>

// In the place of a text's length: it ends with a NUL.
#define MA_NUL_TERMINATED SIZE_MAX

// The version of this interface. It grows with each change after which programs have to be compiled again.
#define MA_ABI_VERSION 2



// In the place of a token's id: the rest of a text, which was held back, without a token of its own.
#define MA_NO_TOKEN UINT32_MAX

// How a call ended. After all but OK ma_last_error says why.
typedef enum {
  // It did what it should.
  MA_STATUS_OK = 0,
  // An argument cannot be: a null pointer, a text that is no UTF-8, a number outside its range, the wrong size of a
  // struct.
  MA_STATUS_INVALID_ARGUMENT = 1,
  // A buffer is too small. How much there is was written to where the length goes.
  MA_STATUS_BUFFER_TOO_SMALL = 2,
  // The context has no room for the prompt.
  MA_STATUS_CONTEXT_FULL = 3,
  // The context, or the batch, is in use by another call.
  MA_STATUS_BUSY = 4,
  // The call was ended by ma_context_cancel.
  MA_STATUS_CANCELLED = 5,
  // The file is missing or damaged, or no model that is supported.
  MA_STATUS_MODEL = 6,
  // The device is not available, or failed.
  MA_STATUS_DEVICE = 7,
  // There is no memory left.
  MA_STATUS_OUT_OF_MEMORY = 8,
  // The model cannot do it: it writes no text, or makes no embeddings.
  MA_STATUS_UNSUPPORTED = 9,
  // Anything else.
  MA_STATUS_FAILED = 10,
  // A defect of this library. What the call worked on should be freed.
  MA_STATUS_DEFECT = 11,
} ma_status;

// Why a text ended.
typedef enum {
  // The model ended it.
  MA_STOP_REASON_END_OF_GENERATION = 0,
  // As many tokens as were asked for.
  MA_STOP_REASON_LENGTH = 1,
  // One of the stop strings.
  MA_STOP_REASON_STOP_STRING = 2,
  // No room in the context.
  MA_STOP_REASON_CONTEXT_FULL = 3,
  // The function that is told of tokens wanted no more.
  MA_STOP_REASON_CALLBACK = 4,
} ma_stop_reason;

// The answer to a conversation, which the library takes apart into thoughts, text and tool calls while it is generated: as the
// member `answer` of ma_generate_options. One answer is for one text.
typedef struct ma_answer ma_answer;

// A model that is set up to run many texts side by side. Prompts that begin alike share what was computed for them.
typedef struct ma_batch ma_batch;

// A conversation as the model's chat template has rendered it. Any number of threads may use one at once.
typedef struct ma_chat ma_chat;

// A model that is set up to run, with room for one text at a time. Threads take turns: a call while another one runs is
// MA_STATUS_BUSY.
typedef struct ma_context ma_context;

// A grammar that texts follow, each from its beginning: the member `grammar` of ma_generate_options. Any number of texts may follow
// one at once.
typedef struct ma_grammar ma_grammar;

// An open model. Any number of threads may use one at once.
typedef struct ma_model ma_model;

// How a model is set up to run. ma_context_options_default sets all members.
typedef struct {
  // Bytes of this struct.
  size_t size;
  // What runs the model: "auto", "cpu", "cuda", "cuda:1", "wgpu", "wgpu:1" by index, "wgpu:NAME". Null: "auto", a GPU with room
  // for it, through CUDA where that can be, else the CPU.
  const char *device;
  // Tokens that a text has room for. 0: as many as the model was trained with, at most 4096.
  size_t n_ctx;
  // Threads that compute on the CPU. 0: one for each physical core.
  size_t n_threads;
  // Most tokens of a prompt that go through the layers at once. 0: as many as suit the device.
  size_t n_ubatch;
  // Not 0: compute in F32 throughout, which is slower and as exact as the weights allow.
  int32_t exact;
} ma_context_options;

// How a conversation is rendered. ma_chat_options_default sets all members.
typedef struct {
  // Bytes of this struct.
  size_t size;
  // The functions that the answer may call: a JSON list of OpenAI's tools, with a NUL at the end. Null: none.
  const char *tools;
  // Variables of the template, such as {"enable_thinking": false}: a JSON object, with a NUL at the end. Null: none.
  const char *variables;
  // Another template than the model's, in Jinja, with a NUL at the end. Null: the model's, or where it has none lines of "User:".
  const char *chat_template;
  // Not 0: the prompt ends with what begins an answer.
  int32_t add_generation_prompt;
  // Not 0: the answer goes on with the last message, which is the assistant's.
  int32_t continue_final_message;
} ma_chat_options;

// A number that is added to the logit of a token.
typedef struct {
  // The token.
  uint32_t id;
  // The number; minus infinity forbids the token.
  float bias;
} ma_logit_bias;

// How tokens are chosen. ma_sampling_options_default sets all members: names, values and order of llama.cpp's samplers.
typedef struct {
  // Bytes of this struct.
  size_t size;
  // Not 0: random numbers begin from `seed`; 0: from the system's.
  int32_t has_seed;
  // Divides the logits; 0 takes the highest.
  float temperature;
  // Where the same text is to come again.
  uint64_t seed;
  // Keeps so many of the highest logits; 0: all.
  size_t top_k;
  // Keeps the most probable tokens up to this total probability; 1: all.
  float top_p;
  // Keeps tokens at least so probable relative to the most probable; 0: all.
  float min_p;
  // Keeps the most typical tokens up to this total probability; 1: all.
  float typical_p;
  // Keeps logits within so many standard deviations of the highest; 0 or less: all.
  float top_n_sigma;
  // The least number of tokens that top_p, min_p, typical_p and XTC leave.
  size_t min_keep;
  // How often, from 0 to 1, the most probable tokens are excluded.
  float xtc_probability;
  // The probability that a token needs to be among these.
  float xtc_threshold;
  // Half the width of the interval of temperatures of which entropy picks one; 0: none.
  float dynatemp_range;
  // The power of the entropy that picks it.
  float dynatemp_exponent;
  // Of how many of the last tokens the next three take note; SIZE_MAX: of all.
  size_t penalty_last_n;
  // Divides the positive logits of tokens that were there; 1: nothing.
  float repeat_penalty;
  // Subtracted for each time that a token was there.
  float frequency_penalty;
  // Subtracted where a token was there.
  float presence_penalty;
  // The penalty of the shortest repetition that DRY penalises; 0: none.
  float dry_multiplier;
  // The factor by which it grows with each token.
  float dry_base;
  // The length from which repetitions are penalised.
  size_t dry_allowed_length;
  // At how many of the last tokens DRY looks; SIZE_MAX: at all.
  size_t dry_penalty_last_n;
  // Strings that end a repetition for DRY, each of which ends with a NUL. Null: line breaks, colons, quotation marks and
  // asterisks; not null, and none of them: none.
  const char *const *dry_sequence_breakers;
  // How many.
  size_t n_dry_sequence_breakers;
  // The samplers in their order, such as "penalties;top_k;temperature". Null: all.
  const char *samplers;
  // Numbers that are added to logits.
  const ma_logit_bias *logit_bias;
  // How many.
  size_t n_logit_bias;
} ma_sampling_options;

// When a text ends, and what it must look like. ma_generate_options_default sets all members.
typedef struct {
  // Bytes of this struct.
  size_t size;
  // Most tokens; SIZE_MAX: until the model ends the text, or the context is full.
  size_t max_tokens;
  // Strings that end the text, each of which ends with a NUL; they are not part of it.
  const char *const *stop;
  // How many.
  size_t n_stop;
  // Tokens that end the text besides those of the vocabulary; they are not part of it.
  const uint32_t *stop_ids;
  // How many.
  size_t n_stop_ids;
  // The least number of tokens before one that ends the text may be chosen.
  size_t min_tokens;
  // Not 0: never choose a token with which the vocabulary ends a text.
  int32_t ignore_eos;
  // What the text must look like; null: nothing in particular.
  const ma_grammar *grammar;
  // Is given the text, which answers its conversation, and takes it apart; null: nothing does. It need not outlive the call.
  const ma_answer *answer;
} ma_generate_options;

// A token that was generated. It is there for as long as the function that is told of it runs.
typedef struct {
  // Its number in the vocabulary, or MA_NO_TOKEN.
  uint32_t id;
  // What can be shown of the text now, in UTF-8, with a NUL behind it: whole characters, and nothing that may turn out to
  // be the start of a stop string. May be empty.
  const char *text;
  // Its bytes, without the NUL behind it.
  size_t length;
} ma_token;

// Is told of each token, with what the caller gave as `user`. Where it returns anything but 0 the text ends. It must not
// leave by an exception or longjmp.
typedef int32_t (*ma_on_token)(const ma_token *token,
                               void *user);

// What came of a call that generates.
typedef struct {
  // Tokens of the prompt.
  size_t n_prompt;
  // Those of them that the context still held, and that were not computed again.
  size_t n_cached;
  // Tokens that were generated.
  size_t n_generated;
  // Why the text ended.
  ma_stop_reason stop_reason;
} ma_generation;

// What came of a text of a batch.
typedef struct {
  // MA_STATUS_OK: it was generated. Else ma_batch_error says why not; `generation` then tells how far it came.
  ma_status status;
  // Its tokens, and why it ended. `n_cached` is 0 where the caller ended it.
  ma_generation generation;
} ma_batch_result;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The version of the interface that the library has; MA_ABI_VERSION is the one that a program was compiled with.
uint32_t ma_abi_version(void);

// The library's version, such as "0.1.0".
const char *ma_version(void);

// Why the last call of this thread that failed did so: one line of UTF-8, empty where none failed yet. It stays as it is
// until another call of this thread fails.
const char *ma_last_error(void);

// Opens the GGUF file at `path`, any of them where it is split, and writes the model to `model`. It is freed by
// ma_model_free.
//
// # Safety
// `path` is null or ends with a NUL; `model` is null or leads to room for a pointer.
ma_status ma_model_open(const char *path,
                        ma_model **model);

// Opens the small model that is part of the library, which tells short stories for children: for a first try.
//
// # Safety
// `model` is null or leads to room for a pointer.
ma_status ma_model_built_in(ma_model **model);

// Frees a model. Contexts that were made of it go on. Null is nothing to free.
//
// # Safety
// `model` is null or comes from ma_model_open or ma_model_built_in, and is not used after this.
void ma_model_free(ma_model *model);

// Size of the vocabulary; 0 for a null pointer.
//
// # Safety
// `model` is null or a model.
size_t ma_model_n_vocab(const ma_model *model);

// Tokens of the texts that the model was trained with; 0 for a null pointer.
//
// # Safety
// `model` is null or a model.
size_t ma_model_n_ctx_train(const ma_model *model);

// Writes the tokens of a text to `ids`, and how many there are to `n_ids`.
//
// `length` is in bytes; MA_NUL_TERMINATED: the text ends with a NUL. `add_special`, where it is not 0, adds the tokens that
// the model wants around a text, as prompts need them; `parse_special` reads spellings of control tokens in it as these. Where
// `ids` has room for too few (`capacity`; null has room for none) the result is MA_STATUS_BUFFER_TOO_SMALL, and `n_ids` how
// many are needed.
//
// # Safety
// Pointers are null or lead to what is said here; `ids` to room for `capacity` of them.
ma_status ma_tokenize(const ma_model *model,
                      const char *text,
                      size_t length,
                      int32_t add_special,
                      int32_t parse_special,
                      uint32_t *ids,
                      size_t capacity,
                      size_t *n_ids);

// Writes the text of tokens to `text`, without a NUL behind it, and its bytes to `length`.
//
// Control tokens are left out, unless `special` is not 0. What is no whole character is U+FFFD. Where `text` has room for too
// little (`capacity`; null has room for nothing) the result is MA_STATUS_BUFFER_TOO_SMALL, and `length` what is needed.
//
// # Safety
// Pointers are null or lead to what is said here; `ids` to `n_ids` ids, `text` to room for `capacity` bytes.
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
// `options` is null or leads to room for `size` bytes.
ma_status ma_context_options_default(ma_context_options *options,
                                     size_t size);

// Sets a model up to run and writes the context to `context`. It is freed by ma_context_free. Null `options` are the
// defaults.
//
// This takes a moment for a large model: weights are brought into the form that the device computes with, and the KV
// cache is allocated.
//
// # Safety
// Pointers are null or lead to what is said here.
ma_status ma_context_new(const ma_model *model,
                         const ma_context_options *options,
                         ma_context **context);

// Frees a context. Null is nothing to free.
//
// # Safety
// `context` is null or comes from ma_context_new; no call uses it, now or after this.
void ma_context_free(ma_context *context);

// Tokens that a text has room for, its prompt included; 0 for a null pointer, and while another call runs.
//
// # Safety
// `context` is null or a context.
size_t ma_context_n_ctx(const ma_context *context);

// Ends the call that runs on the context, from another thread: it returns MA_STATUS_CANCELLED within moments. Calls that
// begin after this are not concerned.
//
// # Safety
// `context` is null or a context.
void ma_context_cancel(const ma_context *context);

// Sets all members of `options`; `size` is sizeof(ma_chat_options).
//
// # Safety
// `options` is null or leads to room for `size` bytes.
ma_status ma_chat_options_default(ma_chat_options *options,
                                  size_t size);

// Renders a conversation through the model's chat template, and writes it to `chat`. It is freed by ma_chat_free.
//
// `messages` is a JSON list of OpenAI's messages, such as [{"role": "user", "content": "Hello!"}]; its `length` is in bytes, or
// MA_NUL_TERMINATED. Null `options` are the defaults. The spelling of a control token in a message stays text.
//
// # Safety
// Pointers are null or lead to what is said here; `messages` to `length` bytes.
ma_status ma_chat_new(const ma_model *model,
                      const char *messages,
                      size_t length,
                      const ma_chat_options *options,
                      ma_chat **chat);

// Frees a conversation. Grammars and answers that were made of it stay. Null is nothing to free.
//
// # Safety
// `chat` is null or comes from ma_chat_new, and is not used after this.
void ma_chat_free(ma_chat *chat);

// Writes the text of the prompt to `text`, without a NUL behind it, and its bytes to `length`.
//
// Where `text` has room for too little (`capacity`; null has room for nothing) the result is MA_STATUS_BUFFER_TOO_SMALL, and
// `length` what is needed. The model is given the ids of ma_chat_tokens, where the spelling of a control token in a message is text.
//
// # Safety
// Pointers are null or lead to what is said here; `text` to room for `capacity` bytes.
ma_status ma_chat_prompt(const ma_chat *chat,
                         char *text,
                         size_t capacity,
                         size_t *length);

// Writes the tokens of the prompt to `ids`, and how many there are to `n_ids`.
//
// Where `ids` has room for too few (`capacity`; null has room for none) the result is MA_STATUS_BUFFER_TOO_SMALL, and `n_ids` how
// many are needed.
//
// # Safety
// Pointers are null or lead to what is said here; `ids` to room for `capacity` of them.
ma_status ma_chat_tokens(const ma_chat *chat,
                         uint32_t *ids,
                         size_t capacity,
                         size_t *n_ids);

// Makes an answer to `chat`, to be filled by a call that generates, and writes it to `answer`. It is freed by ma_answer_free.
//
// # Safety
// Pointers are null or lead to what is said here.
ma_status ma_answer_new(const ma_chat *chat,
                        ma_answer **answer);

// Writes the answer, so far as it was generated, to `message`, without a NUL behind it, and its bytes to `length`: OpenAI's message
// in JSON, with `content`, `reasoning_content` and `tool_calls`, which can be the next one of the conversation. A call that is not
// complete is left out.
//
// Where `message` has room for too little (`capacity`; null has room for nothing) the result is MA_STATUS_BUFFER_TOO_SMALL, and
// `length` what is needed.
//
// # Safety
// Pointers are null or lead to what is said here; `message` to room for `capacity` bytes.
ma_status ma_answer_message(const ma_answer *answer,
                            char *message,
                            size_t capacity,
                            size_t *length);

// Frees an answer. Null is nothing to free.
//
// # Safety
// `answer` is null or comes from ma_answer_new, and is not used after this by the caller.
void ma_answer_free(ma_answer *answer);

// Makes a grammar of `form`, and writes it to `grammar`. It is freed by ma_grammar_free.
//
// `kind`, with a NUL at the end, says what `form` is; its `length` is in bytes, or MA_NUL_TERMINATED:
// "json_schema", a JSON schema; "json_object", any JSON object; "grammar", llama.cpp's GBNF or llguidance's Lark; "regex", a regular
// expression that matches the whole text; "choice", a JSON list of strings of which the text is one; "tool_call" and "tool_calls", one
// call, or one and more, of the tools of `chat`. `form` may be null where `kind` says all.
//
// `chat` is null, or the conversation that the text answers: what the model thinks first then has no form.
//
// # Safety
// Pointers are null or lead to what is said here; `form` to `length` bytes.
ma_status ma_grammar_new(const ma_model *model,
                         const char *kind,
                         const char *form,
                         size_t length,
                         const ma_chat *chat,
                         ma_grammar **grammar);

// Writes the places of a JSON schema that the grammar does not enforce to `places`, without a NUL behind it, and its bytes to
// `length`: a JSON list of strings, mostly empty.
//
// Where `places` has room for too little (`capacity`; null has room for nothing) the result is MA_STATUS_BUFFER_TOO_SMALL, and
// `length` what is needed.
//
// # Safety
// Pointers are null or lead to what is said here; `places` to room for `capacity` bytes.
ma_status ma_grammar_left_out(const ma_grammar *grammar,
                              char *places,
                              size_t capacity,
                              size_t *length);

// Frees a grammar. Texts that follow it go on. Null is nothing to free.
//
// # Safety
// `grammar` is null or comes from ma_grammar_new, and is not used after this.
void ma_grammar_free(ma_grammar *grammar);

// Sets all members of `options`; `size` is sizeof(ma_sampling_options).
//
// # Safety
// `options` is null or leads to room for `size` bytes.
ma_status ma_sampling_options_default(ma_sampling_options *options,
                                      size_t size);

// Like ma_sampling_options_default, but always the token with the highest logit.
//
// # Safety
// `options` is null or leads to room for `size` bytes.
ma_status ma_sampling_options_greedy(ma_sampling_options *options,
                                     size_t size);

// Sets all members of `options`; `size` is sizeof(ma_generate_options).
//
// # Safety
// `options` is null or leads to room for `size` bytes.
ma_status ma_generate_options_default(ma_generate_options *options,
                                      size_t size);

// Continues the tokens of `prompt`, those that the model wants around a text included (see ma_tokenize), and tells `on_token`
// of each new one. What the context still holds of the prompt is not computed again.
//
// Null `sampling` is what the model's file recommends, null `options` the defaults; null `on_token` tells nobody, null
// `generation` is not written to. A call that fails on its way has told of the tokens before.
//
// # Safety
// Pointers are null or lead to what is said here; `prompt` to `n_prompt` ids. `on_token` is null or a function of its type.
ma_status ma_generate(const ma_context *context,
                      const uint32_t *prompt,
                      size_t n_prompt,
                      const ma_sampling_options *sampling,
                      const ma_generate_options *options,
                      ma_on_token on_token,
                      void *user,
                      ma_generation *generation);

// As ma_generate, of a text: its `length` is in bytes, or MA_NUL_TERMINATED. The tokens that the model wants around a text are
// added.
//
// # Safety
// Pointers are null or lead to what is said here; `prompt` to `length` bytes. `on_token` is null or a function of its type.
ma_status ma_complete(const ma_context *context,
                      const char *prompt,
                      size_t length,
                      const ma_sampling_options *sampling,
                      const ma_generate_options *options,
                      ma_on_token on_token,
                      void *user,
                      ma_generation *generation);

// Sets a model up to run up to `n_parallel` texts at once, and writes the batch to `batch`. It is freed by ma_batch_free. Null
// `options` are the defaults; `n_ctx` of them is for each text.
//
// # Safety
// Pointers are null or lead to what is said here.
ma_status ma_batch_new(const ma_model *model,
                       const ma_context_options *options,
                       size_t n_parallel,
                       ma_batch **batch);

// Adds a text to the batch: it continues the tokens of `prompt`, as with ma_generate. Its number among those that the next
// ma_batch_run runs is written to `index`, where that is not null. `on_token` is called by ma_batch_run, in its thread.
//
// # Safety
// Pointers are null or lead to what is said here; `prompt` to `n_prompt` ids. `on_token` is null or a function of its type, and may
// be called with `user` in the thread of ma_batch_run, until that returns.
ma_status ma_batch_add(const ma_batch *batch,
                       const uint32_t *prompt,
                       size_t n_prompt,
                       const ma_sampling_options *sampling,
                       const ma_generate_options *options,
                       ma_on_token on_token,
                       void *user,
                       size_t *index);

// Runs all texts that were added to their ends, and writes what came of each to `results`, in the order in which they were added,
// and how many there are to `n`. The batch is then empty, and can be filled again.
//
// A text that fails does not hold the others up: its result says so. Where `results` has room for too few (`capacity`; null has room
// for none) the result is MA_STATUS_BUFFER_TOO_SMALL, and the texts stay. After ma_batch_cancel it is MA_STATUS_CANCELLED, and
// `results` are written nevertheless. While another ma_batch_run goes on, it is MA_STATUS_BUSY.
//
// # Safety
// Pointers are null or lead to what is said here; `results` to room for `capacity` of them.
ma_status ma_batch_run(const ma_batch *batch,
                       ma_batch_result *results,
                       size_t capacity,
                       size_t *n);

// Why text `index` of the last ma_batch_run failed: one line of UTF-8, empty where it did not, or where there was none. It stays as
// it is until the next ma_batch_run or ma_batch_free.
//
// # Safety
// `batch` is null or a batch.
const char *ma_batch_error(const ma_batch *batch,
                           size_t index);

// Ends the ma_batch_run that goes on, from another thread or from a callback: texts that are not over are MA_STATUS_CANCELLED.
//
// # Safety
// `batch` is null or a batch.
void ma_batch_cancel(const ma_batch *batch);

// Frees a batch, and cancels its texts. Null is nothing to free.
//
// # Safety
// `batch` is null or comes from ma_batch_new; no call uses it, now or after this.
void ma_batch_free(ma_batch *batch);

// Elements of the vectors that ma_embed makes; 0 for a null pointer.
//
// # Safety
// `model` is null or a model.
size_t ma_model_n_embedding(const ma_model *model);

// Writes the embedding of a text to `embedding`, and its elements to `n`: the states of its tokens, pooled as the model's file
// says, of length 1. `length` is in bytes, or MA_NUL_TERMINATED. The text that the context was at is forgotten.
//
// Where `embedding` has room for too few (`capacity`) the result is MA_STATUS_BUFFER_TOO_SMALL; ma_model_n_embedding says how
// many there will be.
//
// # Safety
// Pointers are null or lead to what is said here; `text` to `length` bytes, `embedding` to room for `capacity` elements.
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
