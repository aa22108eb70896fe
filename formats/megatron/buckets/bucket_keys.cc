// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/buckets/bucket_keys.h"

#include <charconv>

#include "core/base/strings.h"
#include "formats/megatron/dist_keys.h"

namespace ckptfs::megatron {
namespace {

// Takes `word` and a number off the front.
std::optional<uint32_t> TakeNumber(std::string_view& rest, std::string_view word) {
  if (!rest.starts_with(word)) return std::nullopt;
  rest.remove_prefix(word.size());
  size_t digits = 0;
  while (digits < rest.size() && IsDigit(rest[digits])) ++digits;
  uint32_t number = 0;
  if (digits == 0 || digits > 9 || (digits > 1 && rest[0] == '0')) return std::nullopt;
  std::from_chars(rest.data(), rest.data() + digits, number);
  rest.remove_prefix(digits);
  return number;
}

bool Take(std::string_view& rest, std::string_view word) {
  if (!rest.starts_with(word)) return false;
  rest.remove_prefix(word.size());
  return true;
}

// The group of a key, which is taken off with what stands before it.
std::optional<GroupObjectKey> TakeGroup(std::string_view& rest) {
  const auto key = OptimizerKeyOf(rest);
  if (!key || !key->kind.empty()) return std::nullopt;
  rest.remove_prefix(key->chain.size());
  const auto group = TakeNumber(rest, "optimizer.distributed.dp_group_idx_");
  if (!group || !Take(rest, ".")) return std::nullopt;
  return GroupObjectKey{key->chain, *group, rest};
}

}  // namespace

std::optional<BucketKey> BucketKeyOf(std::string_view key) {
  std::string_view rest = key;
  const auto group = TakeGroup(rest);
  if (!group) return std::nullopt;
  BucketKey out{.chain = group->chain, .group = group->group, .kind = {}};
  const auto buffer = TakeNumber(rest, "gbuf_idx_");
  if (!buffer || !Take(rest, ".dtype_(torch.")) return std::nullopt;
  const size_t comma = rest.find(", torch.");
  const size_t end = rest.find(").");
  if (comma == std::string_view::npos || end == std::string_view::npos || end < comma) {
    return std::nullopt;
  }
  const auto dtype = DTypeFromTorch(rest.substr(0, comma));
  rest.remove_prefix(end + 2);
  const auto bucket = TakeNumber(rest, "bucket_idx_");
  if (!dtype || !bucket || !Take(rest, ".") || rest.empty()) return std::nullopt;
  out.buffer = *buffer;
  out.parameters = *dtype;
  out.bucket = *bucket;
  out.kind = rest;
  return out;
}

std::optional<GroupObjectKey> GroupObjectKeyOf(std::string_view name) {
  std::string_view rest = name;
  auto group = TakeGroup(rest);
  if (!group || rest.empty() || rest.find('.') != std::string_view::npos) return std::nullopt;
  return group;
}

}  // namespace ckptfs::megatron
