// SPDX-License-Identifier: Apache-2.0

#include "formats/torch/zip_archive.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <span>
#include <utility>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "formats/torch/zip_format.h"

namespace ckptfs {
namespace {

using zip::Load;

// Where the central directory lies.
struct Directory {
  uint64_t offset = 0;
  uint64_t length = 0;
  uint64_t records = 0;
};

constexpr uint64_t kMaxDirectoryBytes = uint64_t{1} << 30;
constexpr uint64_t kTailBytes = 4096;                        // usually holds all end records
constexpr uint64_t kMaxTailBytes = zip::kEndBytes + 0xffff;  // with the longest comment
constexpr uint64_t kTypicalName = 256;                       // read along with a local header
constexpr size_t kLocalBytesAtOnce = size_t{1} << 19;        // of local headers

// The end record nearest to the end of the file whose comment ends with it.
std::optional<size_t> FindEnd(std::string_view tail) {
  if (tail.size() < zip::kEndBytes) return std::nullopt;
  for (size_t at = tail.size() - zip::kEndBytes + 1; at-- > 0;) {
    if (Load<uint32_t>(tail, at) == zip::kEndSignature &&
        at + zip::kEndBytes + Load<uint16_t>(tail, at + 20) == tail.size()) {
      return at;
    }
  }
  return std::nullopt;
}

Result<Directory> ReadEnd64(const FileRange& file, std::string_view locator) {
  uint64_t offset = Load<uint64_t>(locator, 8);
  if (Load<uint32_t>(locator, 4) != 0 || Load<uint32_t>(locator, 16) > 1) {
    return Refuse("the zip spans several disks");
  }
  CKPT_ASSIGN_OR_RETURN(std::string end,
                        file.Read(offset, zip::kEnd64Bytes, "the zip64 end record"));
  if (Load<uint32_t>(end, 0) != zip::kEnd64Signature) {
    return Refuse("the zip64 locator points at no zip64 end record");
  }
  if (Load<uint32_t>(end, 16) != 0 || Load<uint32_t>(end, 20) != 0 ||
      Load<uint64_t>(end, 24) != Load<uint64_t>(end, 32)) {
    return Refuse("the zip spans several disks");
  }
  return Directory{.offset = Load<uint64_t>(end, 48),
                   .length = Load<uint64_t>(end, 40),
                   .records = Load<uint64_t>(end, 32)};
}

Result<Directory> ReadEnd(const FileRange& file) {
  uint64_t size = file.size();
  uint64_t tail_bytes = std::min(size, kTailBytes);
  std::string tail;
  std::optional<size_t> at;
  while (true) {
    CKPT_ASSIGN_OR_RETURN(tail, file.Read(size - tail_bytes, tail_bytes, "the end of the zip"));
    at = FindEnd(tail);
    if (at || tail_bytes == std::min(size, kMaxTailBytes)) break;
    tail_bytes = std::min(size, kMaxTailBytes);
  }
  if (!at) return Refuse("no zip end record: the file is truncated or not a zip");
  std::string_view end = std::string_view(tail).substr(*at);
  uint64_t end_offset = size - tail_bytes + *at;
  Directory directory{.offset = Load<uint32_t>(end, 16),
                      .length = Load<uint32_t>(end, 12),
                      .records = Load<uint16_t>(end, 10)};
  if (end_offset >= zip::kLocatorBytes) {
    CKPT_ASSIGN_OR_RETURN(std::string locator, file.Read(end_offset - zip::kLocatorBytes,
                                                         zip::kLocatorBytes, "the zip64 locator"));
    if (Load<uint32_t>(locator, 0) == zip::kLocatorSignature) {
      CKPT_ASSIGN_OR_RETURN(directory, ReadEnd64(file, locator));
    }
  }
  if (!RangeInside(directory.offset, directory.length, end_offset)) {
    return Refuse("the central directory reaches beyond its end record");
  }
  return directory;
}

// The zip64 extra field, for those fields that are 0xffffffff.
Status ApplyZip64(std::string_view extra, std::initializer_list<uint64_t*> fields) {
  bool needed = std::any_of(fields.begin(), fields.end(),
                            [](const uint64_t* field) { return *field == zip::kBig32; });
  while (needed && extra.size() >= 4) {
    uint16_t id = Load<uint16_t>(extra, 0);
    size_t length = Load<uint16_t>(extra, 2);
    if (length > extra.size() - 4) return Refuse("an extra field reaches beyond its record");
    std::string_view body = extra.substr(4, length);
    extra.remove_prefix(4 + length);
    if (id != zip::kZip64Extra) continue;
    for (uint64_t* field : fields) {
      if (*field != zip::kBig32) continue;
      if (body.size() < 8) return Refuse("a zip64 extra field is too short");
      *field = Load<uint64_t>(body, 0);
      body.remove_prefix(8);
    }
    return {};
  }
  return {};
}

Status CheckName(std::string_view name) {
  if (name.empty()) return Refuse("a zip record without a name");
  if (name.front() == '/' || name.find('\0') != std::string_view::npos ||
      name.find('\\') != std::string_view::npos) {
    return Refuse("zip record '", name, "': absolute names, backslashes and NUL are refused");
  }
  for (size_t begin = 0; begin <= name.size();) {
    size_t end = std::min(name.find('/', begin), name.size());
    if (name.substr(begin, end - begin) == "..") {
      return Refuse("zip record '", name, "': '..' in a name is refused");
    }
    begin = end + 1;
  }
  return {};
}

Status CheckMethod(const ZipRecord& record, uint16_t flags, uint16_t method) {
  if ((flags & (zip::kFlagEncrypted | zip::kFlagStrongEncryption | zip::kFlagMasked)) != 0) {
    return Refuse("zip record '", record.name, "' is encrypted");
  }
  if (record.name.find("/code/") != std::string::npos) {
    return Refuse("zip record '", record.name,
                  "' is code of TorchScript (torch.jit.save), which is not run: save the module's "
                  "state_dict() by torch.save");
  }
  if (method != 0 || (flags & zip::kFlagPatched) != 0) {
    return Refuse("zip record '", record.name, "' is compressed (method ", method, ")");
  }
  return {};
}

// One entry of the central directory; advances `rest` past it.
Result<ZipRecord> ParseCentral(std::string_view& rest) {
  if (rest.size() < zip::kCentralBytes || Load<uint32_t>(rest, 0) != zip::kCentralSignature) {
    return Refuse("the central directory is damaged");
  }
  size_t name = Load<uint16_t>(rest, 28);
  size_t extra = Load<uint16_t>(rest, 30);
  size_t comment = Load<uint16_t>(rest, 32);
  if (name + extra + comment > rest.size() - zip::kCentralBytes) {
    return Refuse("a record reaches beyond the central directory");
  }
  ZipRecord record;
  record.name = rest.substr(zip::kCentralBytes, name);
  record.crc = Load<uint32_t>(rest, 16);
  record.length = Load<uint32_t>(rest, 24);
  record.header_offset = Load<uint32_t>(rest, 42);
  uint64_t compressed = Load<uint32_t>(rest, 20);
  CKPT_RETURN_IF_ERROR(CheckName(record.name));
  CKPT_RETURN_IF_ERROR(CheckMethod(record, Load<uint16_t>(rest, 8), Load<uint16_t>(rest, 10)));
  CKPT_RETURN_IF_ERROR(ApplyZip64(rest.substr(zip::kCentralBytes + name, extra),
                                  {&record.length, &compressed, &record.header_offset}));
  if (compressed != record.length) {
    return Refuse("zip record '", record.name, "': stored and original size differ");
  }
  rest.remove_prefix(zip::kCentralBytes + name + extra + comment);
  return record;
}

// A rule that a record breaks.
auto RefuseRecord(const ZipRecord& record, std::string_view what) {
  return Refuse("zip record '", record.name, "': ", what);
}

// How much of the file is read for a record's local header.
Result<uint64_t> LocalBytes(const ZipRecord& record, uint64_t limit) {
  if (!RangeInside(record.header_offset, zip::kLocalBytes, limit)) {
    return RefuseRecord(record, "its local header lies beyond the central directory");
  }
  const uint64_t wanted = zip::kLocalBytes + std::max<uint64_t>(record.name.size(), kTypicalName);
  return std::min(wanted, limit - record.header_offset);
}

// Finds the payload; `header` is what LocalBytes says of the file.
Status ParseLocal(std::string_view header, uint64_t limit, ZipRecord& record) {
  auto rule = [&](std::string_view what) { return RefuseRecord(record, what); };
  if (Load<uint32_t>(header, 0) != zip::kLocalSignature) return rule("it has no local header");
  uint64_t name = Load<uint16_t>(header, 26);
  uint64_t extra = Load<uint16_t>(header, 28);
  CKPT_RETURN_IF_ERROR(CheckMethod(record, Load<uint16_t>(header, 6), Load<uint16_t>(header, 8)));
  if (name != record.name.size() || header.size() < zip::kLocalBytes + name ||
      header.compare(zip::kLocalBytes, name, record.name) != 0) {
    return rule("its local header has another name");
  }
  bool descriptor = (Load<uint16_t>(header, 6) & zip::kFlagDescriptor) != 0;
  uint32_t size = Load<uint32_t>(header, 22);
  if (!descriptor && size != zip::kBig32 && size != record.length) {
    return rule("its local header has another size");
  }
  record.offset = record.header_offset + zip::kLocalBytes + name + extra;
  if (!RangeInside(record.offset, record.length, limit)) {
    return rule(StrCat("its ", record.length, " bytes reach beyond the central directory"));
  }
  return {};
}

// The local headers of some records, read together: a file may have thousands of records
// of nothing, one header after another.
class LocalHeaders {
 public:
  // As many of the first records as one reading is for, at least one.
  static Result<LocalHeaders> Read(const FileRange& file, uint64_t limit,
                                   std::span<const ZipRecord> records) {
    LocalHeaders headers;
    size_t total = 0;
    for (const ZipRecord& record : records) {
      if (total >= kLocalBytesAtOnce) break;
      CKPT_ASSIGN_OR_RETURN(const uint64_t length, LocalBytes(record, limit));
      headers.ends_.push_back(total += length);
    }
    headers.bytes_.resize(total);
    std::vector<ReadRequest> requests;
    for (size_t i = 0; i < headers.size(); ++i) {
      requests.push_back({records[i].header_offset,
                          std::as_writable_bytes(std::span(headers.bytes_))
                              .subspan(headers.Begin(i), headers.ends_[i] - headers.Begin(i))});
    }
    CKPT_RETURN_IF_ERROR(file.ReadNear(std::move(requests), "a local header"));
    return headers;
  }

  size_t size() const { return ends_.size(); }
  std::string_view operator[](size_t i) const {
    return std::string_view(bytes_).substr(Begin(i), ends_[i] - Begin(i));
  }

 private:
  size_t Begin(size_t i) const { return i == 0 ? 0 : ends_[i - 1]; }

  std::string bytes_;
  std::vector<size_t> ends_;
};

// Finds the payloads.  `limit` is where the central directory begins.
Status ReadLocals(const FileRange& file, uint64_t limit, std::span<ZipRecord> records) {
  while (!records.empty()) {
    CKPT_ASSIGN_OR_RETURN(const LocalHeaders headers, LocalHeaders::Read(file, limit, records));
    for (size_t i = 0; i < headers.size(); ++i) {
      CKPT_RETURN_IF_ERROR(ParseLocal(headers[i], limit, records[i]));
    }
    records = records.subspan(headers.size());
  }
  return {};
}

Status CheckOverlaps(const std::vector<ZipRecord>& records) {
  std::vector<const ZipRecord*> sorted;
  sorted.reserve(records.size());
  for (const ZipRecord& record : records) sorted.push_back(&record);
  std::sort(sorted.begin(), sorted.end(), [](const ZipRecord* a, const ZipRecord* b) {
    return a->header_offset < b->header_offset;
  });
  for (size_t i = 1; i < sorted.size(); ++i) {
    if (sorted[i]->header_offset < sorted[i - 1]->offset + sorted[i - 1]->length) {
      return Refuse("zip records '", sorted[i - 1]->name, "' and '", sorted[i]->name, "' overlap");
    }
  }
  return {};
}

}  // namespace

Result<ZipArchive> ZipArchive::Open(const FileRange& file) {
  CKPT_ASSIGN_OR_RETURN(Directory directory, ReadEnd(file));
  if (directory.length > kMaxDirectoryBytes) return Refuse("the central directory exceeds 1 GiB");
  if (directory.records > directory.length / zip::kCentralBytes) {
    return Refuse("more zip records than the central directory can hold");
  }
  CKPT_ASSIGN_OR_RETURN(std::string bytes,
                        file.Read(directory.offset, directory.length, "the central directory"));
  ZipArchive archive;
  std::string_view rest = bytes;
  for (uint64_t i = 0; i < directory.records; ++i) {
    CKPT_ASSIGN_OR_RETURN(ZipRecord record, ParseCentral(rest));
    archive.records_.push_back(std::move(record));
  }
  if (!rest.empty()) return Refuse("more bytes in the central directory than its records");
  archive.by_name_.resize(archive.records_.size());
  std::iota(archive.by_name_.begin(), archive.by_name_.end(), 0);
  auto name = [&](uint32_t i) -> const std::string& { return archive.records_[i].name; };
  std::sort(archive.by_name_.begin(), archive.by_name_.end(),
            [&](uint32_t a, uint32_t b) { return name(a) < name(b); });
  for (size_t i = 1; i < archive.by_name_.size(); ++i) {
    if (name(archive.by_name_[i]) == name(archive.by_name_[i - 1])) {
      return Refuse("two zip records are named '", name(archive.by_name_[i]), "'");
    }
  }
  CKPT_RETURN_IF_ERROR(ReadLocals(file, directory.offset, archive.records_));
  CKPT_RETURN_IF_ERROR(CheckOverlaps(archive.records_));
  for (ZipRecord& record : archive.records_) {
    record.header_offset += file.begin();
    record.offset += file.begin();
  }
  return archive;
}

const ZipRecord* ZipArchive::Find(std::string_view name) const {
  auto found =
      std::lower_bound(by_name_.begin(), by_name_.end(), name,
                       [&](uint32_t i, std::string_view n) { return records_[i].name < n; });
  if (found == by_name_.end() || records_[*found].name != name) return nullptr;
  return &records_[*found];
}

}  // namespace ckptfs
