// Errors that reach Python.

#pragma once

#include <concepts>
#include <cstdio>
#include <string>
#include <string_view>

namespace twostep {

// As RuntimeError, and as NotImplementedError (binding/tensor.cpp).
[[noreturn]] void raise(const std::string& message);
[[noreturn]] void raise_not_implemented(const std::string& message);

inline std::string text_of(std::string_view text) { return std::string(text); }
inline std::string text_of(std::integral auto number) { return std::to_string(number); }
inline std::string text_of(double number) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", number);
  return text;
}

// Raise what the parts of a message are together: text, numbers, or what else has a text_of.
template <class... Part>
[[noreturn, gnu::cold, gnu::noinline]] void fail(const Part&... parts) {
  raise((text_of(parts) + ...));
}
template <class... Part>
[[noreturn, gnu::cold, gnu::noinline]] void fail_not_implemented(const Part&... parts) {
  raise_not_implemented((text_of(parts) + ...));
}

}  // namespace twostep

#define TWOSTEP_CHECK(condition, ...) \
  do {                                \
    if (!(condition)) [[unlikely]]    \
      ::twostep::fail(__VA_ARGS__);   \
  } while (false)
