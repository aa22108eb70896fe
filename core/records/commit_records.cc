// SPDX-License-Identifier: Apache-2.0
#include "core/records/commit_records.h"

#include <fmt/format.h>

#include <charconv>
#include <limits>
#include <nlohmann/json.hpp>
#include <tuple>

#include "core/base/names.h"
#include "core/base/strings.h"
#include "core/blob/chunk_digests.h"
#include "core/blob/chunk_list.h"
#include "core/records/record_text.h"
#include "core/records/records.h"

namespace ckptfs {
namespace {

using nlohmann::json;

constexpr size_t kHexDigits = 32;
// A part whose ranks have lists of chunks, whose digests older builds would not find.  The marks
// below have version 2.
constexpr int kListedPartVersion = 3;
constexpr size_t kMaxJob = 200;  // as the protocol has it (snapshot/receive/rank_session.cc)
constexpr uint64_t kMaxFileBytes = uint64_t{1} << 50;
constexpr size_t kNamedRanges = 8;

template <class Number>
std::optional<Number> NumberOf(const json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_number_unsigned()) return std::nullopt;
  const auto value = found->get<uint64_t>();
  if (value > std::numeric_limits<Number>::max()) return std::nullopt;
  return static_cast<Number>(value);
}

std::optional<Digest> DigestUnder(const json& object, const char* key) {
  return DigestFromHex(TextOf(object, key).value_or(""));
}

std::string HexOf(const std::vector<Digest>& digests) {
  std::string text;
  text.reserve(digests.size() * kHexDigits);
  for (const Digest& digest : digests) text += digest.Hex();
  return text;
}

std::optional<std::vector<Digest>> DigestsOf(std::string_view text) {
  std::vector<Digest> digests;
  for (; !text.empty(); text.remove_prefix(kHexDigits)) {
    const auto digest = DigestFromHex(text.substr(0, kHexDigits));
    if (!digest) return std::nullopt;
    digests.push_back(*digest);
  }
  return digests;
}

json Named(const AttemptName& name) {
  return {{"version", kRecordVersion},
          {"run", EncodeText(name.run)},
          {"job", EncodeText(name.job)},
          {"life", name.life.Hex()},
          {"attempt", name.attempt}};
}

Digest JobDigest(std::string_view run, std::string_view job, const Digest& life) {
  return DigestOf(StrCat(run, "\n", job, life == Digest() ? "" : "\n" + life.Hex()));
}

// Run and job, which have to be those of the record's name.
Result<std::pair<std::string, std::string>> JobOf(const json& object, const Digest& job,
                                                  const Digest& life) {
  auto run = TextOf(object, "run");
  auto text = TextOf(object, "job");
  if (!run || !text || text->size() > kMaxJob)
    return Refuse(
        "record: its run or job is missing, "
        "or its job is too long");
  CKPT_RETURN_IF_ERROR(CheckName(*run, "run"));
  if (JobDigest(*run, *text, life) != job)
    return Refuse(
        "record: its job is not the one in its "
        "name");
  return std::pair(*std::move(run), *std::move(text));
}

Result<AttemptName> AttemptOf(const json& object, const CommitName& name) {
  const auto life = DigestUnder(object, "life");
  if (!life) return Refuse("record: its life is missing");
  CKPT_ASSIGN_OR_RETURN(auto job, JobOf(object, name.job, *life));
  const auto attempt = NumberOf<uint64_t>(object, "attempt");
  if (!attempt || *attempt != name.attempt) {
    return Refuse("record: its attempt is not the one in its name");
  }
  return AttemptName{std::move(job.first), std::move(job.second), *attempt, *life};
}

Result<PreparedRank> RankOf(const json& object) {
  if (!object.is_object()) return Refuse("record: a rank must be an object");
  const auto rank = NumberOf<uint32_t>(object, "rank");
  const auto bytes = NumberOf<uint64_t>(object, "bytes");
  const auto list = DigestUnder(object, "chunk_list");
  const auto chunks = object.find("chunks");
  const bool listed = object.contains("chunk_list");
  const bool sound = listed ? list && *list != Digest{} && chunks == object.end()
                            : chunks != object.end() && chunks->is_string();
  if (!rank || !bytes || *bytes > kMaxFileBytes || !sound) {
    return Refuse("record: a rank must have a number, bytes and chunks");
  }
  if (listed) return PreparedRank{*rank, *bytes, {}, *list};
  auto digests = DigestsOf(chunks->get_ref<const std::string&>());
  if (!digests || digests->size() != ChunkCount(*bytes, kChunkBytes)) {
    return Refuse("record: rank ", *rank, " has digests that do not fit its ", *bytes, " bytes");
  }
  return PreparedRank{*rank, *bytes, *std::move(digests)};
}

constexpr std::string_view kPart = "part-";
constexpr std::string_view kRanks = "ranks-";
constexpr std::string_view kWorld = "world";
constexpr std::string_view kOutcome = "outcome";
constexpr std::string_view kDone = "done";
constexpr int kLayoutVersion = 2;

Digest LayoutMarkJob() { return DigestOf("one folder per attempt"); }

// A decimal number, in its one spelling.
template <class Number>
std::optional<Number> NumberNamed(std::string_view text) {
  Number number = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || std::to_string(number) != text) return std::nullopt;
  return number;
}

// "<node>.<rank>"
bool ReadNodeAndRank(std::string_view text, CommitName& name) {
  const auto node = DigestNamed(text.substr(0, kHexDigits));
  if (!node || text.size() < kHexDigits + 1 || text[kHexDigits] != '.') return false;
  const auto rank = NumberNamed<uint32_t>(text.substr(kHexDigits + 1));
  if (!rank) return false;
  name.node = *node;
  name.first_rank = *rank;
  return true;
}

// The name of a job's, or of one attempt's, record in its folder.
bool ReadJobName(std::string_view text, CommitName& name) {
  name.kind = text == kWorld ? CommitName::Kind::kWorld : CommitName::Kind::kRanks;
  if (text == kWorld) return true;
  if (!text.starts_with(kRanks)) return false;
  const auto node = DigestNamed(text.substr(kRanks.size()));
  if (node) name.node = *node;
  return node.has_value();
}
bool ReadAttemptName(std::string_view text, CommitName& name) {
  name.kind = text == kOutcome ? CommitName::Kind::kOutcome : CommitName::Kind::kDone;
  if (text == kOutcome || text == kDone) return true;
  name.kind = CommitName::Kind::kPart;
  return text.starts_with(kPart) && ReadNodeAndRank(text.substr(kPart.size()), name);
}

std::optional<std::string_view> BelowPrepared(std::string_view path) {
  if (!path.starts_with(kPreparedFolder)) return std::nullopt;
  path.remove_prefix(kPreparedFolder.size());
  if (!path.starts_with('/')) return std::nullopt;
  return path.substr(1);
}

}  // namespace

bool PreparedRank::IsSameAs(const PreparedRank& other) const {
  const auto list = [](const PreparedRank& one) {
    return one.chunk_list == Digest{} ? DigestOfChunks(one.chunks) : one.chunk_list;
  };
  return rank == other.rank && bytes == other.bytes && list(*this) == list(other);
}

PreparedPart PreparedPart::WithChunkLists() const {
  PreparedPart listed = *this;
  for (PreparedRank& one : listed.ranks) {
    if (one.chunks.size() > kInlineChunks) one.chunk_list = DigestOfChunks(one.chunks);
  }
  return listed;
}

std::string PreparedPart::Directory() const {
  return StrCat("snapshots/", DigestOf(StrCat(name.run, "\n", name.job, "\n", name.attempt, "\n",
                                              step, "\n", name.life.Hex()))
                                  .Hex());
}

std::string PreparedPart::PathOf(uint32_t rank) const {
  return fmt::format("{}/rank-{:05}.safetensors", Directory(), rank);
}

Digest LifeOf(const std::map<uint32_t, uint64_t>& ranks) {
  std::string text;
  for (const auto& [rank, life] : ranks) text += StrCat(rank, " ", life, "\n");
  return DigestOf(text);
}

std::optional<CommitName> ParseCommitName(std::string_view path) {
  const auto below = BelowPrepared(path);
  const size_t slash = below ? below->find('/') : std::string_view::npos;
  if (slash == std::string_view::npos) return std::nullopt;
  const auto job = DigestNamed(below->substr(0, slash));
  if (!job) return std::nullopt;
  CommitName name;
  name.job = *job;
  const std::string_view rest = below->substr(slash + 1);
  const size_t end = rest.find('/');
  if (end == std::string_view::npos) {
    return ReadJobName(rest, name) ? std::optional(name) : std::nullopt;
  }
  const auto attempt = NumberNamed<uint64_t>(rest.substr(0, end));
  if (!attempt || !ReadAttemptName(rest.substr(end + 1), name)) return std::nullopt;
  name.attempt = *attempt;
  return name;
}

std::optional<CommitName> ParseFlatName(std::string_view path) {
  const auto below = BelowPrepared(path);
  const size_t first = below ? below->find('-') : std::string_view::npos;
  const size_t last = below ? below->rfind('-') : std::string_view::npos;
  if (first == std::string_view::npos || first == last) return std::nullopt;
  const auto job = DigestNamed(below->substr(0, first));
  if (!job) return std::nullopt;
  CommitName name;
  name.job = *job;
  const std::string_view middle = below->substr(first + 1, last - first - 1);
  const std::string_view end = below->substr(last + 1);
  if (middle == "ranks") {
    const auto node = DigestNamed(end);
    if (!node) return std::nullopt;
    name.kind = CommitName::Kind::kRanks;
    name.node = *node;
    return name;
  }
  const auto attempt = NumberNamed<uint64_t>(middle);
  if (!attempt) return std::nullopt;
  name.attempt = *attempt;
  name.kind = end == kOutcome ? CommitName::Kind::kOutcome : CommitName::Kind::kDone;
  if (end == kOutcome || end == kDone) return name;
  name.kind = CommitName::Kind::kPart;
  return ReadNodeAndRank(end, name) ? std::optional(name) : std::nullopt;
}

std::string PathOf(const CommitName& name) {
  const std::string job = StrCat(kPreparedFolder, "/", name.job.Hex(), "/");
  switch (name.kind) {
    case CommitName::Kind::kWorld: return StrCat(job, kWorld);
    case CommitName::Kind::kRanks: return StrCat(job, kRanks, name.node.Hex());
    case CommitName::Kind::kOutcome: return StrCat(job, name.attempt, "/", kOutcome);
    case CommitName::Kind::kDone: return StrCat(job, name.attempt, "/", kDone);
    case CommitName::Kind::kPart: break;
  }
  return StrCat(job, name.attempt, "/", kPart, name.node.Hex(), ".", name.first_rank);
}

std::string LifeFolder(const AttemptName& name) {
  return StrCat(kPreparedFolder, "/", JobDigest(name.run, name.job, name.life).Hex());
}
std::string AttemptFolder(const AttemptName& name) {
  return StrCat(LifeFolder(name), "/", name.attempt);
}
std::string JobFolder(std::string_view run, std::string_view job) {
  return StrCat(kPreparedFolder, "/", JobDigest(run, job, Digest()).Hex());
}
std::string PartName(const PreparedPart& part, const Digest& node) {
  return StrCat(AttemptFolder(part.name), "/", kPart, node.Hex(), ".", part.ranks.front().rank);
}
std::string FlatPartName(const PreparedPart& part, const Digest& node) {
  return StrCat(LifeFolder(part.name), "-", part.name.attempt, "-", node.Hex(), ".",
                part.ranks.front().rank);
}
std::string OutcomeName(const AttemptName& name) {
  return StrCat(AttemptFolder(name), "/", kOutcome);
}
std::string DoneName(const AttemptName& name) { return StrCat(AttemptFolder(name), "/", kDone); }
std::string NodeRanksName(std::string_view run, std::string_view job, const Digest& node) {
  return StrCat(JobFolder(run, job), "/", kRanks, node.Hex());
}
std::string WorldName(std::string_view run, std::string_view job) {
  return StrCat(JobFolder(run, job), "/", kWorld);
}

std::array<std::string, 2> LayoutMarks() {
  const std::string prefix = StrCat(kPreparedFolder, "/", LayoutMarkJob().Hex(), "-0-");
  return {StrCat(prefix, Digest().Hex(), ".0"), StrCat(prefix, kOutcome)};
}
std::string LayoutMarkText() {
  return SealRecord({{"version", kLayoutVersion}, {"layout", "one%20folder%20per%20attempt"}});
}
bool IsLayoutMark(const CommitName& flat) { return flat.job == LayoutMarkJob(); }

std::string PresenceName(const Digest& node) { return StrCat(kNodesFolder, "/", node.Hex()); }

std::string RenderPart(const PreparedPart& part) {
  json object = Named(part.name);
  object["step"] = part.step;
  object["world"] = part.world;
  object["mtime_ns"] = part.mtime_ns;
  json ranks = json::array();
  for (const PreparedRank& rank : part.ranks) {
    const bool listed = rank.chunk_list != Digest{};
    ranks.push_back(
        {{"rank", rank.rank},
         {"bytes", rank.bytes},
         {listed ? "chunk_list" : "chunks", listed ? rank.chunk_list.Hex() : HexOf(rank.chunks)}});
    if (listed) object["version"] = kListedPartVersion;
  }
  object["ranks"] = std::move(ranks);
  return SealRecord(object);
}

Result<PreparedPart> ParsePart(std::string_view bytes, const CommitName& name) {
  auto plain = UnsealRecord(bytes);
  const bool listed = !plain && plain.error().code == ErrorCode::kUnsupported;
  CKPT_ASSIGN_OR_RETURN(const json object,
                        listed ? UnsealRecord(bytes, kListedPartVersion) : std::move(plain));
  PreparedPart part;
  CKPT_ASSIGN_OR_RETURN(part.name, AttemptOf(object, name));
  const auto step = NumberOf<uint64_t>(object, "step");
  const auto world = NumberOf<uint32_t>(object, "world");
  const auto mtime = object.find("mtime_ns");
  const auto ranks = object.find("ranks");
  if (!step || !world || *world == 0 || *world > kMaxPreparedWorld || mtime == object.end() ||
      !mtime->is_number_integer() || ranks == object.end() || !ranks->is_array() ||
      ranks->empty()) {
    return Refuse("record: a part must have a step, a world, a time and ranks");
  }
  part.step = *step;
  part.world = *world;
  part.mtime_ns = mtime->get<int64_t>();
  for (const json& one : *ranks) {
    CKPT_ASSIGN_OR_RETURN(PreparedRank rank, RankOf(one));
    const bool ascends = part.ranks.empty() || part.ranks.back().rank < rank.rank;
    if (!ascends || rank.rank >= part.world) {
      return Refuse("record: rank ", rank.rank, " of ", part.world, " is out of order");
    }
    part.ranks.push_back(std::move(rank));
  }
  return part;
}

std::string RenderOutcome(const AttemptOutcome& outcome) {
  json object = Named(outcome.name);
  object["step"] = outcome.step;
  object["node"] = outcome.node.Hex();
  if (outcome.manifest) {
    object["manifest"] = outcome.manifest->Hex();
  } else {
    object["dropped"] = EncodeText(outcome.dropped);
  }
  return SealRecord(object);
}

Result<AttemptOutcome> ParseOutcome(std::string_view bytes, const CommitName& name) {
  CKPT_ASSIGN_OR_RETURN(const json object, UnsealRecord(bytes));
  AttemptOutcome outcome;
  CKPT_ASSIGN_OR_RETURN(outcome.name, AttemptOf(object, name));
  const auto step = NumberOf<uint64_t>(object, "step");
  const auto node = DigestUnder(object, "node");
  const auto dropped = TextOf(object, "dropped");
  outcome.manifest = DigestUnder(object, "manifest");
  if (!step || !node || outcome.manifest.has_value() == dropped.has_value()) {
    return Refuse("record: an outcome must have a step, a node, and a manifest or a reason");
  }
  outcome.step = *step;
  outcome.node = *node;
  outcome.dropped = dropped.value_or("");
  return outcome;
}

std::string RenderDone(const AttemptDone& done) {
  return SealRecord({{"version", kRecordVersion},
                     {"node", done.node.Hex()},
                     {"id", EncodeText(done.id)},
                     {"manifest", done.manifest.Hex()}});
}

Result<AttemptDone> ParseDone(std::string_view bytes) {
  CKPT_ASSIGN_OR_RETURN(const json object, UnsealRecord(bytes));
  const auto node = DigestUnder(object, "node");
  const auto manifest = DigestUnder(object, "manifest");
  auto id = TextOf(object, "id");
  if (!node || !manifest || !id) return Refuse("record: the step that it became is missing");
  CKPT_RETURN_IF_ERROR(CheckName(*id, "step"));
  return AttemptDone{*node, *std::move(id), *manifest};
}

namespace {

json PairsOf(const std::map<uint32_t, uint64_t>& ranks) {
  json pairs = json::array();
  for (const auto& [rank, life] : ranks) pairs.push_back(json::array({rank, life}));
  return pairs;
}

// Ranks of `world`, each with its life.
Result<std::map<uint32_t, uint64_t>> RanksUnder(const json& object, uint32_t world) {
  const auto pairs = object.find("ranks");
  if (pairs == object.end() || !pairs->is_array()) return Refuse("record: its ranks are missing");
  std::map<uint32_t, uint64_t> ranks;
  for (const json& pair : *pairs) {
    const bool numbers = pair.is_array() && pair.size() == 2 && pair[0].is_number_unsigned() &&
                         pair[1].is_number_unsigned();
    if (!numbers || pair[0].get<uint64_t>() >= world) {
      return Refuse("record: a rank lies outside its world");
    }
    ranks[pair[0].get<uint32_t>()] = pair[1].get<uint64_t>();
  }
  return ranks;
}

Result<uint32_t> WorldUnder(const json& object) {
  const auto world = NumberOf<uint32_t>(object, "world");
  if (world && *world != 0 && *world <= kMaxPreparedWorld) return *world;
  return Refuse("record: its world is missing");
}

}  // namespace

std::string RenderNodeRanks(const NodeRanks& ranks) {
  return SealRecord({{"version", kRecordVersion},
                     {"run", EncodeText(ranks.run)},
                     {"job", EncodeText(ranks.job)},
                     {"world", ranks.world},
                     {"host", EncodeText(ranks.host)},
                     {"ranks", PairsOf(ranks.ranks)}});
}

Result<NodeRanks> ParseNodeRanks(std::string_view bytes, const CommitName& name) {
  CKPT_ASSIGN_OR_RETURN(const json object, UnsealRecord(bytes));
  CKPT_ASSIGN_OR_RETURN(auto job, JobOf(object, name.job, Digest()));
  CKPT_ASSIGN_OR_RETURN(const uint32_t world, WorldUnder(object));
  CKPT_ASSIGN_OR_RETURN(auto ranks, RanksUnder(object, world));
  return NodeRanks{std::move(job.first), std::move(job.second), world,
                   TextOf(object, "host").value_or(""), std::move(ranks)};
}

std::string RenderWorld(const WorldRecord& world) {
  json hosts = json::array();
  for (const WorldRecord::Host& host : world.hosts) {
    hosts.push_back({{"host", EncodeText(host.name)}, {"ranks", PairsOf(host.ranks)}});
  }
  return SealRecord({{"version", kRecordVersion},
                     {"run", EncodeText(world.run)},
                     {"job", EncodeText(world.job)},
                     {"world", world.world},
                     {"node", world.node.Hex()},
                     {"hosts", std::move(hosts)},
                     {"refused", EncodeText(world.refused)}});
}

Result<WorldRecord> ParseWorld(std::string_view bytes, const CommitName& name) {
  CKPT_ASSIGN_OR_RETURN(const json object, UnsealRecord(bytes));
  WorldRecord world;
  CKPT_ASSIGN_OR_RETURN(std::tie(world.run, world.job), JobOf(object, name.job, Digest()));
  CKPT_ASSIGN_OR_RETURN(world.world, WorldUnder(object));
  const auto node = DigestUnder(object, "node");
  const auto refused = TextOf(object, "refused");
  const auto hosts = object.find("hosts");
  if (!node || !refused || hosts == object.end() || !hosts->is_array()) {
    return Refuse("record: a world must have a node and hosts");
  }
  world.node = *node;
  world.refused = *refused;
  for (const json& one : *hosts) {
    if (!one.is_object()) return Refuse("record: a host must be an object");
    CKPT_ASSIGN_OR_RETURN(auto ranks, RanksUnder(one, world.world));
    world.hosts.push_back({TextOf(one, "host").value_or(""), std::move(ranks)});
  }
  return world;
}

std::string RenderPresence(const NodePresence& presence) {
  json names = json::array();
  for (const std::string& name : presence.names) names.push_back(EncodeText(name));
  return SealRecord({{"version", kRecordVersion},
                     {"beat", presence.beat},
                     {"host", EncodeText(presence.host)},
                     {"boot", EncodeText(presence.boot)},
                     {"device", presence.device},
                     {"names", std::move(names)}});
}

Result<NodePresence> ParsePresence(std::string_view bytes) {
  CKPT_ASSIGN_OR_RETURN(const json object, UnsealRecord(bytes));
  const auto beat = NumberOf<uint64_t>(object, "beat");
  const auto device = NumberOf<uint64_t>(object, "device");
  const auto names = object.find("names");
  if (!beat || *beat == 0 || !device || names == object.end() || !names->is_array()) {
    return Refuse("record: its beat, device or names are missing");
  }
  NodePresence presence{
      *beat, TextOf(object, "host").value_or(""), TextOf(object, "boot").value_or(""), *device, {}};
  for (const json& name : *names) {
    const auto text =
        name.is_string() ? DecodeText(name.get_ref<const std::string&>()) : std::nullopt;
    if (!text) return Refuse("record: a name must be a text");
    presence.names.push_back(*text);
  }
  return presence;
}

std::string RanksText(const std::set<uint32_t>& ranks) {
  std::string text;
  size_t ranges = 0, named = 0;
  for (auto at = ranks.begin(); at != ranks.end() && ranges < kNamedRanges; ++ranges) {
    const uint32_t first = *at;
    uint32_t last = first;
    for (++named, ++at; at != ranks.end() && *at == last + 1; ++at, ++named) last = *at;
    text += StrCat(ranges == 0 ? "" : ", ", first);
    if (last != first) text += StrCat("-", last);
  }
  if (named < ranks.size()) text += StrCat(" and ", ranks.size() - named, " more");
  return text;
}

}  // namespace ckptfs
