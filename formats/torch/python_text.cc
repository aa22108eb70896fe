// SPDX-License-Identifier: Apache-2.0

#include "formats/torch/python_text.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string_view>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

using Kind = PickleNode::Kind;

constexpr int kDeepestTuple = 8;

// The shortest digits that give the number again, without an exponent from 1e-4 to 1e16.
std::string FloatText(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  char buffer[64];
  const auto written =
      std::to_chars(buffer, buffer + sizeof(buffer), value, std::chars_format::scientific);
  std::string_view text(buffer, static_cast<size_t>(written.ptr - buffer));
  const size_t mark = text.find('e');
  int exponent = 0;
  const size_t sign = text[mark + 1] == '+' ? 1 : 0;
  std::from_chars(text.data() + mark + 1 + sign, text.data() + text.size(), exponent);
  if (exponent < -4 || exponent >= 16) return std::string(text);
  const auto end = std::to_chars(buffer, buffer + sizeof(buffer), value, std::chars_format::fixed);
  text = std::string_view(buffer, static_cast<size_t>(end.ptr - buffer));
  return StrCat(text, text.find('.') == text.npos ? ".0" : "");
}

std::optional<std::string> Repr(PickleRef value, int depth) {
  if (value.IsNone()) return "None";
  switch (value.node().kind) {
    case Kind::kBool: return *value.Bool() ? "True" : "False";
    case Kind::kInt: return std::to_string(*value.Int());
    case Kind::kFloat: return FloatText(*value.Number());
    case Kind::kString: {
      const std::string_view text = *value.String();
      const bool plain = std::ranges::all_of(
          text, [](char c) { return c >= ' ' && c <= '~' && c != '\'' && c != '\\'; });
      return plain ? std::optional(StrCat("'", text, "'")) : std::nullopt;
    }
    case Kind::kTuple: break;
    default: return std::nullopt;
  }
  if (depth == kDeepestTuple) return std::nullopt;
  std::string out = "(";
  for (size_t i = 0; i < value.size(); ++i) {
    const auto item = Repr(value.at(i), depth + 1);
    if (!item) return std::nullopt;
    out += StrCat(i == 0 ? "" : ", ", *item);
  }
  return StrCat(out, value.size() == 1 ? ",)" : ")");
}

}  // namespace

std::optional<std::string> PythonText(PickleRef value) {
  if (const auto text = value.String()) return std::string(*text);
  return Repr(value, 0);
}

}  // namespace ckptfs
