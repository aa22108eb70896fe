// SPDX-License-Identifier: Apache-2.0

#include "core/blob/safetensors_header.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <unordered_set>

#include "core/base/checked_math.h"
#include "core/base/json_text.h"
#include "core/base/strings.h"

namespace ckptfs {
namespace {

constexpr uint64_t kPrefix = 8;
constexpr uint64_t kDataAlignment = 4096;

tl::unexpected<Error> Rule(const std::string& message) {
  return Fail(ErrorCode::kInvalid, StrCat("safetensors: ", message));
}

// Reads the header's JSON event by event: exactly the shape of the grammar is
// accepted, so that depth, duplicates and types need no tree.
class HeaderEvents : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit HeaderEvents(SafetensorsHeader& header) : header_(header) {}
  const std::string& rule() const { return rule_; }

  bool null() override { return Refuse("null is not a value of a header"); }
  bool boolean(bool) override { return Refuse("a boolean is not a value of a header"); }
  bool number_integer(number_integer_t) override { return Refuse("a number is negative"); }
  bool number_float(number_float_t, const string_t&) override {
    return Refuse("a number is not an integer below 2^64");
  }
  bool binary(binary_t&) override { return Refuse("binary data"); }
  bool number_unsigned(number_unsigned_t value) override;
  bool string(string_t& value) override;
  bool start_object(size_t) override;
  bool key(string_t& value) override;
  bool end_object() override;
  bool start_array(size_t) override;
  bool end_array() override;
  bool parse_error(size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    return Refuse(StrCat("the header is not JSON at byte ", position));
  }

 private:
  enum class Where { kStart, kTop, kTensor, kMetadata, kShape, kOffsets, kEnd };
  enum Seen : unsigned { kDType = 1, kShapeKey = 2, kOffsetsKey = 4 };

  bool Refuse(std::string rule) {
    if (rule_.empty()) rule_ = std::move(rule);
    return false;
  }
  std::string Tensor() const { return StrCat("tensor '", entry_.name, "'"); }
  bool TensorKey(const std::string& name);

  SafetensorsHeader& header_;
  std::string rule_;
  Where where_ = Where::kStart;
  SafetensorsEntry entry_;
  unsigned seen_ = 0;     // of the tensor's keys
  unsigned current_ = 0;  // the key whose value comes next
  std::vector<uint64_t> offsets_;
  std::string metadata_key_;
  std::set<std::string, std::less<>> names_;
};

bool HeaderEvents::number_unsigned(number_unsigned_t value) {
  if (where_ == Where::kShape) {
    if (entry_.shape.size() >= kMaxDimensions)
      return Refuse(Tensor() + ": more than 64 dimensions");
    entry_.shape.push_back(value);
    return true;
  }
  if (where_ != Where::kOffsets) return Refuse("a number is in a wrong place");
  if (offsets_.size() >= 2) return Refuse(Tensor() + ": data_offsets has more than two numbers");
  offsets_.push_back(value);
  return true;
}

bool HeaderEvents::string(string_t& value) {
  if (where_ == Where::kMetadata) {
    if (!header_.metadata.emplace(metadata_key_, value).second) {
      return Refuse(StrCat("__metadata__ has two keys '", metadata_key_, "'"));
    }
    return true;
  }
  if (where_ != Where::kTensor || current_ != kDType) return Refuse("a string is in a wrong place");
  auto dtype = DTypeFromSafetensors(value);
  if (!dtype) return Refuse(StrCat(Tensor(), ": unknown dtype '", value, "'"));
  entry_.dtype = *dtype;
  current_ = 0;
  return true;
}

bool HeaderEvents::start_object(size_t) {
  if (where_ == Where::kStart) {
    where_ = Where::kTop;
    return true;
  }
  if (where_ != Where::kTop) return Refuse("an object is in a wrong place");
  where_ = entry_.name == "__metadata__" ? Where::kMetadata : Where::kTensor;
  seen_ = current_ = 0;
  return true;
}

bool HeaderEvents::TensorKey(const std::string& name) {
  if (current_ != 0) return Refuse(Tensor() + ": a key does not have a value");
  current_ = name == "dtype"          ? kDType
             : name == "shape"        ? kShapeKey
             : name == "data_offsets" ? kOffsetsKey
                                      : 0u;
  if (current_ == 0) return Refuse(StrCat(Tensor(), ": unknown key '", name, "'"));
  if ((seen_ & current_) != 0) return Refuse(StrCat(Tensor(), ": two keys '", name, "'"));
  seen_ |= current_;
  return true;
}

bool HeaderEvents::key(string_t& value) {
  if (where_ == Where::kMetadata) {
    metadata_key_ = value;
    return true;
  }
  if (where_ == Where::kTensor) return TensorKey(value);
  if (!names_.insert(value).second) return Refuse(StrCat("two keys '", value, "'"));
  entry_ = SafetensorsEntry{.name = value, .dtype = DType::kF32, .shape = {}};
  offsets_.clear();
  return true;
}

bool HeaderEvents::end_object() {
  if (where_ == Where::kTop) {
    where_ = Where::kEnd;
    return true;
  }
  if (where_ == Where::kTensor) {
    if (seen_ != (kDType | kShapeKey | kOffsetsKey) || current_ != 0) {
      return Refuse(Tensor() + ": dtype, shape or data_offsets is missing");
    }
    entry_.begin = offsets_[0];
    entry_.end = offsets_[1];
    header_.entries.push_back(std::move(entry_));
    entry_ = {};
  }
  where_ = Where::kTop;
  return true;
}

bool HeaderEvents::start_array(size_t) {
  if (where_ != Where::kTensor || (current_ != kShapeKey && current_ != kOffsetsKey)) {
    return Refuse("a list is in a wrong place");
  }
  where_ = current_ == kShapeKey ? Where::kShape : Where::kOffsets;
  current_ = 0;
  return true;
}

bool HeaderEvents::end_array() {
  if (where_ == Where::kOffsets && offsets_.size() != 2) {
    return Refuse(Tensor() + ": data_offsets does not have two numbers");
  }
  where_ = Where::kTensor;
  return true;
}

// Contiguous from 0 without holes, each as long as its shape says.
Status CheckRanges(SafetensorsHeader& header, uint64_t data_bytes) {
  std::sort(header.entries.begin(), header.entries.end(),
            [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
              return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
            });
  uint64_t next = 0;
  for (const SafetensorsEntry& entry : header.entries) {
    std::string name = StrCat("tensor '", entry.name, "'");
    if (entry.begin != next || entry.end < entry.begin) {
      return Rule(StrCat(name, ": its range [", entry.begin, ", ", entry.end,
                         ") leaves a hole or overlaps: it should start at ", next));
    }
    auto elements = ElementCount(entry.shape);
    if (!elements) return Rule(StrCat(name, ": ", elements.error().message));
    CKPT_ASSIGN_OR_RETURN(uint64_t bits, CheckedMul(*elements, BitWidth(entry.dtype), name));
    if (bits % 8 != 0 || entry.end - entry.begin != bits / 8) {
      return Rule(StrCat(name, ": ", entry.end - entry.begin, " bytes do not fit ",
                         SafetensorsName(entry.dtype), ShapeToString(entry.shape)));
    }
    next = entry.end;
  }
  if (next != data_bytes) {
    return Rule(StrCat("the tensors have ", next, " bytes, but the file has ", data_bytes,
                       " after its header"));
  }
  return {};
}

struct CountingSink {
  uint64_t bytes = 0;
  void Append(std::string_view text) { bytes += text.size(); }
};

struct TextSink {
  std::string text;
  void Append(std::string_view more) { text += more; }
};

template <class Sink>
void WriteNumber(Sink& sink, uint64_t value) {
  char digits[20];
  size_t at = sizeof(digits);
  do {
    digits[--at] = static_cast<char>('0' + value % 10);
    value /= 10;
  } while (value != 0);
  sink.Append(std::string_view(digits + at, sizeof(digits) - at));
}

// A JSON string; bytes above 0x7f are passed on as UTF-8.
template <class Sink>
void WriteString(Sink& sink, std::string_view text) {
  constexpr std::string_view kHex = "0123456789abcdef";
  sink.Append("\"");
  size_t plain = 0;  // start of what needs no escape
  for (size_t i = 0; i < text.size(); ++i) {
    unsigned char c = static_cast<unsigned char>(text[i]);
    if (c >= 0x20 && c != '"' && c != '\\') continue;
    sink.Append(text.substr(plain, i - plain));
    plain = i + 1;
    char escape[6] = {'\\', 'u', '0', '0', kHex[c >> 4], kHex[c & 15]};
    char quoted[2] = {'\\', static_cast<char>(c)};
    sink.Append(c < 0x20 ? std::string_view(escape, 6) : std::string_view(quoted, 2));
  }
  sink.Append(text.substr(plain));
  sink.Append("\"");
}

template <class Sink>
void WriteEntry(Sink& sink, const SafetensorsEntry& entry, uint64_t begin, uint64_t end) {
  WriteString(sink, entry.name);
  sink.Append(":{\"dtype\":\"");
  sink.Append(SafetensorsName(entry.dtype));
  sink.Append("\",\"shape\":[");
  for (size_t d = 0; d < entry.shape.size(); ++d) {
    if (d != 0) sink.Append(",");
    WriteNumber(sink, entry.shape[d]);
  }
  sink.Append("],\"data_offsets\":[");
  WriteNumber(sink, begin);
  sink.Append(",");
  WriteNumber(sink, end);
  sink.Append("]}");
}

// Prefix, JSON and padding; the ranges are handed to `place`.
template <class Sink, class Place>
Status WriteHeader(Sink& sink, const std::map<std::string, std::string>& metadata,
                   const std::vector<SafetensorsEntry>& entries, Place place) {
  std::string_view separator = "{";
  if (!metadata.empty()) {
    sink.Append("{\"__metadata__\":{");
    std::string_view inner = "";
    for (const auto& [key, value] : metadata) {
      sink.Append(inner);
      WriteString(sink, key);
      sink.Append(":");
      WriteString(sink, value);
      inner = ",";
    }
    sink.Append("}");
    separator = ",";
  }
  uint64_t begin = 0;
  for (size_t i = 0; i < entries.size(); ++i) {
    const SafetensorsEntry& entry = entries[i];
    if (SafetensorsName(entry.dtype).empty()) {
      return Rule(
          StrCat("tensor '", entry.name, "': the format has no dtype ", DTypeName(entry.dtype)));
    }
    CKPT_ASSIGN_OR_RETURN(uint64_t bytes, ByteCount(entry.shape, entry.dtype));
    CKPT_ASSIGN_OR_RETURN(uint64_t end, CheckedAdd(begin, bytes, "safetensors data"));
    sink.Append(separator);
    WriteEntry(sink, entry, begin, end);
    place(i, begin, end);
    separator = ",";
    begin = end;
  }
  if (separator == "{") sink.Append("{");
  sink.Append("}");
  return {};
}

Status CheckNames(const std::vector<SafetensorsEntry>& entries) {
  std::unordered_set<std::string_view> names;
  names.reserve(entries.size());
  for (const SafetensorsEntry& entry : entries) {
    if (entry.name == "__metadata__") return Rule("a tensor named __metadata__");
    if (!names.insert(entry.name).second) return Rule(StrCat("two tensors '", entry.name, "'"));
  }
  return {};
}

}  // namespace

Result<uint64_t> SafetensorsHeaderLength(std::string_view first_eight, uint64_t file_size) {
  if (file_size < kPrefix || first_eight.size() < kPrefix) {
    return Rule("the file is shorter than its length field");
  }
  uint64_t length = 0;
  for (size_t i = kPrefix; i-- > 0;) {
    length = (length << 8) | static_cast<unsigned char>(first_eight[i]);
  }
  if (length > kSafetensorsMaxHeader) {
    return Rule(StrCat("a header of ", length, " bytes exceeds the format's 100,000,000"));
  }
  if (!RangeInside(kPrefix, length, file_size)) {
    return Rule(StrCat("a header of ", length, " bytes in a file of ", file_size));
  }
  return length;
}

Result<SafetensorsHeader> ParseSafetensorsHeader(std::string_view head, uint64_t file_size) {
  CKPT_ASSIGN_OR_RETURN(uint64_t length, SafetensorsHeaderLength(head, file_size));
  if (head.size() - kPrefix < length) return Rule("the header was not read whole");
  SafetensorsHeader header;
  header.data_offset = kPrefix + length;
  std::string_view json = head.substr(kPrefix, length);
  HeaderEvents events(header);
  if (HasNul(json)) return Rule("not JSON: it holds a NUL byte");
  if (HasByteOrderMark(json)) return Rule("not JSON: it begins with a byte-order mark");
  if (!nlohmann::json::sax_parse(json.begin(), json.end(), &events)) return Rule(events.rule());
  CKPT_RETURN_IF_ERROR(CheckRanges(header, file_size - header.data_offset));
  return header;
}

Result<std::string> RenderSafetensorsHeader(const std::map<std::string, std::string>& metadata,
                                            std::vector<SafetensorsEntry>& entries) {
  CKPT_RETURN_IF_ERROR(CheckNames(entries));
  TextSink sink;
  sink.text.assign(kPrefix, '\0');
  CKPT_RETURN_IF_ERROR(
      WriteHeader(sink, metadata, entries, [&](size_t i, uint64_t begin, uint64_t end) {
        entries[i].begin = begin;
        entries[i].end = end;
      }));
  sink.text.resize(AlignUp(sink.text.size(), kDataAlignment), ' ');
  uint64_t length = sink.text.size() - kPrefix;
  if (length > kSafetensorsMaxHeader) return Rule("the header exceeds 100,000,000 bytes");
  for (size_t i = 0; i < kPrefix; ++i) sink.text[i] = static_cast<char>((length >> (8 * i)) & 0xff);
  return std::move(sink.text);
}

Result<uint64_t> SafetensorsHeaderSize(const std::map<std::string, std::string>& metadata,
                                       const std::vector<SafetensorsEntry>& entries) {
  CountingSink sink{kPrefix};
  CKPT_RETURN_IF_ERROR(WriteHeader(sink, metadata, entries, [](size_t, uint64_t, uint64_t) {}));
  return AlignUp(sink.bytes, kDataAlignment);
}

}  // namespace ckptfs
