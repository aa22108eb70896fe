// SPDX-License-Identifier: Apache-2.0

#include "core/peer/peer_protocol.h"

#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "core/base/names.h"
#include "core/base/strings.h"
#include "core/blob/chunk_digests.h"
#include "core/records/record_text.h"

namespace ckptfs {
namespace {

using nlohmann::json;

constexpr uint32_t kMagic = 0x32504b43;  // "CKP2": the protocol's second version
constexpr size_t kCheckedBytes = kPeerFrameBytes - 8;
constexpr uint32_t kLastWord = static_cast<uint32_t>(PeerWord::kSpooled);
constexpr size_t kMaxListed = 1 << 16;
constexpr size_t kMaxDirectory = 64;

template <class Number>
void Put(std::byte* out, Number number) {
  for (size_t i = 0; i < sizeof number; ++i) out[i] = static_cast<std::byte>(number >> (8 * i));
}

template <class Number>
Number Take(const std::byte* in) {
  Number number = 0;
  for (size_t i = sizeof number; i-- > 0;) number = number << 8 | static_cast<Number>(in[i]);
  return number;
}

uint64_t CheckOf(std::span<const std::byte, kPeerFrameBytes> bytes, std::string_view text) {
  const std::string_view head(reinterpret_cast<const char*>(bytes.data()), kCheckedBytes);
  return HashOf(text, HashOf(head));
}

template <class Number>
std::optional<Number> NumberOf(const json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_number_unsigned()) return std::nullopt;
  const auto value = found->get<uint64_t>();
  if (value > std::numeric_limits<Number>::max()) return std::nullopt;
  return static_cast<Number>(value);
}

std::optional<int64_t> TimeOf(const json& object) {
  const auto found = object.find("mtime_ns");
  if (found == object.end() || !found->is_number_integer()) return std::nullopt;
  return found->get<int64_t>();
}

std::optional<Digest> DigestUnder(const json& object, const char* key) {
  return DigestFromHex(TextOf(object, key).value_or(""));
}

// An attempt's name among an object's fields.
json FieldsOf(const AttemptName& name) {
  return {{"run", EncodeText(name.run)},
          {"job", EncodeText(name.job)},
          {"life", name.life.Hex()},
          {"attempt", name.attempt}};
}

std::optional<AttemptName> AttemptIn(const json& object) {
  auto run = TextOf(object, "run");
  auto job = TextOf(object, "job");
  const auto life = DigestUnder(object, "life");
  const auto attempt = NumberOf<uint64_t>(object, "attempt");
  if (!run || !job || !life || !attempt) return std::nullopt;
  return AttemptName{*std::move(run), *std::move(job), *attempt, *life};
}

// A unit's place in a stripe among an object's fields.
json FieldsOf(const StripeShape& shape, uint32_t unit) {
  return {{"data", shape.data}, {"parity", shape.parity}, {"unit", unit}};
}

Status ShapeIn(const json& object, StripeShape& shape, uint32_t& unit) {
  const auto found = object.find("shape");
  if (found == object.end() || !found->is_object()) return Refuse("peer: a shape is expected");
  const auto data = NumberOf<uint32_t>(*found, "data");
  const auto parity = NumberOf<uint32_t>(*found, "parity");
  const auto number = NumberOf<uint32_t>(*found, "unit");
  if (!data || !parity || !number) return Refuse("peer: a shape lacks a field");
  const bool whole = *data == 1 && *parity == 0 && *number == 0;
  const bool cut = *data > 1 && *data <= kMostUnits && *parity <= kMostUnits - *data &&
                   *number < *data + *parity;
  if (!whole && !cut) return Refuse("peer: unit ", *number, " of ", *data, "+", *parity);
  shape = {*data, *parity};
  unit = *number;
  return {};
}

// A list of what `from` makes of its objects.
template <class One>
Result<std::vector<One>> ListUnder(std::string_view text, const char* key,
                                   Result<One> (*from)(const json&)) {
  CKPT_ASSIGN_OR_RETURN(json object, UnsealRecord(text));
  const auto found = object.find(key);
  if (found == object.end() || !found->is_array() || found->size() > kMaxListed) {
    return Refuse("peer: a list of ", key, " is expected");
  }
  std::vector<One> list;
  for (const json& one : *found) {
    CKPT_ASSIGN_OR_RETURN(One made, from(one));
    list.push_back(std::move(made));
  }
  return list;
}

Result<ShelvedPart> ShelvedFrom(const json& one) {
  if (!one.is_object()) return Refuse("peer: a part is an object");
  auto name = AttemptIn(one);
  const auto step = NumberOf<uint64_t>(one, "step");
  const auto world = NumberOf<uint32_t>(one, "world");
  const auto rank = NumberOf<uint32_t>(one, "rank");
  const auto bytes = NumberOf<uint64_t>(one, "bytes");
  const auto state = NumberOf<uint32_t>(one, "state");
  const auto chunks = DigestUnder(one, "chunks");
  const auto mtime = TimeOf(one);
  const auto parity = DigestUnder(one, "parity_chunks");
  if (!name || !step || !world || !rank || !bytes || !state || !chunks || !mtime || !parity) {
    return Refuse("peer: a part lacks a field");
  }
  CKPT_RETURN_IF_ERROR(CheckName(name->run, "run"));
  if (*world == 0 || *world > kMaxPreparedWorld || *rank >= *world) {
    return Refuse("peer: rank ", *rank, " of ", *world);
  }
  if (*state < 1 || *state > 2) return Refuse("peer: a part in state ", *state);
  ShelvedPart part{*std::move(name),
                   *step,
                   *world,
                   *mtime,
                   *rank,
                   *bytes,
                   *chunks,
                   static_cast<ShelvedState>(*state),
                   {},
                   0,
                   *parity};
  CKPT_RETURN_IF_ERROR(ShapeIn(one, part.shape, part.unit));
  return part;
}

Result<ShownMemoryStep> ShownFrom(const json& one) {
  if (!one.is_object()) return Refuse("peer: a step is an object");
  auto name = AttemptIn(one);
  auto id = TextOf(one, "id");
  auto directory = TextOf(one, "directory");
  const auto manifest = DigestUnder(one, "manifest");
  const auto mtime = TimeOf(one);
  const auto step = NumberOf<uint64_t>(one, "step");
  if (!name || !id || !directory || !manifest || !mtime || !step ||
      directory->size() > kMaxDirectory) {
    return Refuse("peer: a step lacks a field");
  }
  CKPT_RETURN_IF_ERROR(CheckName(name->run, "run"));
  CKPT_RETURN_IF_ERROR(CheckName(*id, "step"));
  return ShownMemoryStep{*std::move(name),      *std::move(id), *manifest,
                         *std::move(directory), *mtime,         *step};
}

}  // namespace

std::array<std::byte, kPeerFrameBytes> EncodePeerFrame(const PeerFrame& frame) {
  CKPT_CHECK(frame.text.size() <= kMaxPeerText && frame.payload_bytes <= kMaxPeerPayload);
  std::array<std::byte, kPeerFrameBytes> bytes{};
  Put(&bytes[0], kMagic);
  Put(&bytes[4], static_cast<uint32_t>(frame.word));
  Put(&bytes[8], frame.rank);
  Put(&bytes[12], frame.slot);
  Put(&bytes[16], frame.offset);
  Put(&bytes[24], frame.length);
  Put(&bytes[32], frame.digest.high);
  Put(&bytes[40], frame.digest.low);
  Put(&bytes[48], static_cast<uint32_t>(frame.text.size()));
  Put(&bytes[52], static_cast<uint32_t>(frame.payload_bytes));
  Put(&bytes[kCheckedBytes], CheckOf(bytes, frame.text));
  return bytes;
}

Result<PeerHeader> DecodePeerHeader(std::span<const std::byte, kPeerFrameBytes> bytes,
                                    uint64_t max_text) {
  if (Take<uint32_t>(&bytes[0]) != kMagic) {
    return Refuse("peer: it does not speak this version of the protocol");
  }
  PeerHeader header;
  const auto word = Take<uint32_t>(&bytes[4]);
  if (word == 0 || word > kLastWord) return Refuse("peer: word ", word, " is not known");
  header.frame.word = static_cast<PeerWord>(word);
  header.frame.rank = Take<uint32_t>(&bytes[8]);
  header.frame.slot = Take<uint32_t>(&bytes[12]);
  header.frame.offset = Take<uint64_t>(&bytes[16]);
  header.frame.length = Take<uint64_t>(&bytes[24]);
  header.frame.digest = {Take<uint64_t>(&bytes[32]), Take<uint64_t>(&bytes[40])};
  header.text_bytes = Take<uint32_t>(&bytes[48]);
  header.frame.payload_bytes = Take<uint32_t>(&bytes[52]);
  header.check = Take<uint64_t>(&bytes[kCheckedBytes]);
  if (header.text_bytes > max_text) {
    return Refuse("peer: a text of ", header.text_bytes, " bytes, at most ", max_text);
  }
  if (header.frame.payload_bytes > kMaxPeerPayload) {
    return Refuse("peer: a payload of ", header.frame.payload_bytes, " bytes, at most ",
                  kMaxPeerPayload);
  }
  return header;
}

Status CheckPeerFrame(const PeerHeader& header, std::span<const std::byte, kPeerFrameBytes> bytes,
                      std::string_view text) {
  if (header.check == CheckOf(bytes, text)) return {};
  return Fail(ErrorCode::kDataLoss, "peer: a frame is not what was sent");
}

std::string ShelvedPart::Directory() const {
  return PreparedPart{name, step, world, mtime_ns, {}}.Directory();
}

std::vector<Digest> UnitRecord::chunks() const {
  if (!shape.cuts()) return rank().chunks;
  std::vector<Digest> chunks;
  for (uint64_t row = 0; shape.ChunkBytesOf(unit, row, rank().bytes) != 0; ++row)
    chunks.push_back(ChunkOf(unit, row));
  return chunks;
}

Digest UnitRecord::ChunkOf(uint32_t of_unit, uint64_t row) const {
  if (of_unit < shape.data) return rank().chunks.at(row * shape.data + of_unit);
  return parity_chunks.at((of_unit - shape.data) * shape.RowsOf(rank().bytes) + row);
}

std::string RenderUnit(const UnitRecord& record) {
  json chunks = json::array();
  for (const Digest& chunk : record.parity_chunks) chunks.push_back(chunk.Hex());
  return SealRecord({{"version", kRecordVersion},
                     {"part", EncodeText(RenderPart(record.part))},
                     {"shape", FieldsOf(record.shape, record.unit)},
                     {"parity_chunks", std::move(chunks)}});
}

// ParsePart holds a record against its name, which is made of what the record says.
Result<UnitRecord> ParseUnit(std::string_view text) {
  CKPT_ASSIGN_OR_RETURN(const json object, UnsealRecord(text));
  const auto whole = TextOf(object, "part");
  if (!whole) return Refuse("peer: a unit lacks its part");
  CKPT_ASSIGN_OR_RETURN(const json part, UnsealRecord(*whole));
  const auto attempt = AttemptIn(part);
  if (!attempt) return Refuse("peer: a part lacks its name");
  const auto name = ParseCommitName(OutcomeName(*attempt));
  if (!name) return Refuse("peer: a part of no attempt");
  UnitRecord record;
  CKPT_ASSIGN_OR_RETURN(record.part, ParsePart(*whole, *name));
  if (record.part.ranks.size() != 1) return Refuse("peer: a part of one rank is expected");
  if (record.rank().chunk_list != Digest{}) return Refuse("peer: a unit lacks its file's digests");
  CKPT_RETURN_IF_ERROR(ShapeIn(object, record.shape, record.unit));
  const auto chunks = object.find("parity_chunks");
  const uint64_t expected =
      record.shape.parity * record.shape.RowsOf(record.part.ranks.front().bytes);
  if (chunks == object.end() || !chunks->is_array() || chunks->size() != expected)
    return Refuse("peer: a unit has ", expected, " digests of parity");
  for (const json& one : *chunks) {
    const auto digest =
        one.is_string() ? DigestFromHex(one.get_ref<const std::string&>()) : std::nullopt;
    if (!digest) return Refuse("peer: a digest of parity is expected");
    record.parity_chunks.push_back(*digest);
  }
  return record;
}

ShelvedPart ShelvedOf(const UnitRecord& record, ShelvedState state) {
  const PreparedPart& part = record.part;
  ShelvedPart shelved{part.name,
                      part.step,
                      part.world,
                      part.mtime_ns,
                      record.rank().rank,
                      record.rank().bytes,
                      DigestOfChunks(record.rank().chunks),
                      state,
                      record.shape,
                      record.unit,
                      {}};
  if (record.shape.cuts()) shelved.parity_chunks = DigestOfChunks(record.parity_chunks);
  return shelved;
}

std::string RenderShelved(const std::vector<ShelvedPart>& parts) {
  json list = json::array();
  for (const ShelvedPart& part : parts) {
    json& one = list.emplace_back(FieldsOf(part.name));
    one.update({{"step", part.step},
                {"world", part.world},
                {"mtime_ns", part.mtime_ns},
                {"rank", part.rank},
                {"bytes", part.bytes},
                {"chunks", part.chunks.Hex()},
                {"state", static_cast<uint32_t>(part.state)},
                {"shape", FieldsOf(part.shape, part.unit)},
                {"parity_chunks", part.parity_chunks.Hex()}});
  }
  return SealRecord({{"version", kRecordVersion}, {"parts", std::move(list)}});
}

Result<std::vector<ShelvedPart>> ParseShelved(std::string_view text) {
  return ListUnder(text, "parts", &ShelvedFrom);
}

std::string RenderShown(const std::vector<ShownMemoryStep>& steps) {
  json list = json::array();
  for (const ShownMemoryStep& step : steps) {
    json& one = list.emplace_back(FieldsOf(step.name));
    one.update({{"id", EncodeText(step.id)},
                {"manifest", step.manifest.Hex()},
                {"directory", EncodeText(step.directory)},
                {"mtime_ns", step.mtime_ns},
                {"step", step.step}});
  }
  return SealRecord({{"version", kRecordVersion}, {"steps", std::move(list)}});
}

Result<std::vector<ShownMemoryStep>> ParseShown(std::string_view text) {
  return ListUnder(text, "steps", &ShownFrom);
}

}  // namespace ckptfs
