// SPDX-License-Identifier: Apache-2.0

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include "core/base/strings.h"
#include "formats/torch/pickle/pickle_reader.h"
#include "formats/torch/pickle_writer.h"

namespace ckptfs {
namespace {

using ::testing::HasSubstr;
using Kind = PickleNode::Kind;

// A pickle that may hold NUL bytes.
template <size_t n>
std::string Bytes(const char (&text)[n]) {
  return std::string(text, n - 1);
}

PickleTree Parse(std::string_view bytes) {
  auto parsed = ParsePickle(bytes);
  EXPECT_TRUE(parsed.has_value()) << parsed.error().message;
  return parsed ? std::move(parsed->tree)
                : PickleTree{.nodes = {PickleNode{}}, .tensors = {}, .extras = {}, .root = 0};
}

void ExpectRefused(std::string_view bytes, const std::string& rule) {
  auto parsed = ParsePickle(bytes);
  ASSERT_FALSE(parsed.has_value()) << rule;
  EXPECT_EQ(parsed.error().code, ErrorCode::kInvalid);
  EXPECT_THAT(parsed.error().message, HasSubstr(rule));
}

std::string Reprint(std::string_view bytes) {
  auto printed = PrintPickle(Parse(bytes));
  EXPECT_TRUE(printed.has_value()) << printed.error().message;
  return printed.value_or("");
}

TEST(PickleTest, Scalars) {
  EXPECT_TRUE(RootOf(Parse("N.")).IsNone());
  EXPECT_EQ(RootOf(Parse("\x88.")).Bool(), true);
  EXPECT_EQ(RootOf(Parse("I01\n.")).Bool(), true);
  EXPECT_EQ(RootOf(Parse("I-5\n.")).Int(), -5);
  EXPECT_EQ(RootOf(Parse("L-129L\n.")).Int(), -129);
  EXPECT_EQ(RootOf(Parse(Bytes("J\xff\xff\xff\xff."))).Int(), -1);
  EXPECT_EQ(RootOf(Parse(Bytes("M\x00\x01."))).Int(), 256);
  EXPECT_EQ(RootOf(Parse(Bytes("\x8a\x00."))).Int(), 0);
  EXPECT_EQ(RootOf(Parse(Bytes("\x8a\x02\x7f\xff."))).Int(), -129);
  EXPECT_EQ(RootOf(Parse(Bytes("\x8b\x01\x00\x00\x00\x80."))).Int(), -128);
  EXPECT_EQ(RootOf(Parse(Bytes("\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x80\xff."))).Int(), INT64_MIN);
  EXPECT_EQ(RootOf(Parse(Bytes("\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x80\x00."))).node().kind,
            Kind::kBigInt);
  EXPECT_EQ(RootOf(Parse("F-1.5e3\n.")).Number(), -1500);
  EXPECT_EQ(RootOf(Parse(Bytes("G\x3f\xf0\x00\x00\x00\x00\x00\x00."))).Number(), 1);
  EXPECT_EQ(RootOf(Parse(Bytes("\x8c\x02hi."))).String(), "hi");
  EXPECT_EQ(RootOf(Parse("V\\u00e9\n.")).String(), "\xc3\xa9");
  EXPECT_EQ(RootOf(Parse("S'a\\x41\\n\\101'\n.")).String(), "aA\nA");
}

TEST(PickleTest, AccessorsOfTheWrongKindAreEmpty) {
  PickleTree tree = Parse("K\x05.");
  PickleRef five = RootOf(tree);
  EXPECT_FALSE(five["x"]);
  EXPECT_FALSE(five["x"]["y"].at(3).AtInt(1));
  EXPECT_FALSE(five.String() || five.Bool() || five.AsShape() || five.Tensor());
  EXPECT_FALSE(five.IsDict() || five.IsSequence() || five.IsNone());
  EXPECT_EQ(five.size(), 0u);
  EXPECT_TRUE(five.Items().empty());
  EXPECT_FALSE(PickleRef().State());
  EXPECT_EQ(PickleRef().ClassName(), "");
}

TEST(PickleTest, DictsListsAndObjects) {
  PickleTree tree = Parse(Bytes("(dX\x01\0\0\0aK\x01sX\x01\0\0\0aK\x02sK\x07(K\x03K\x04ts."));
  EXPECT_EQ(RootOf(tree)["a"].Int(), 2);  // the last of equal keys, as in Python
  EXPECT_EQ(RootOf(tree).AtInt(7).AsShape(), (Shape{3, 4}));
  tree = Parse(Bytes("cm\nC\n)\x81}X\x01\0\0\0kK\x09sb."));
  EXPECT_EQ(RootOf(tree).ClassName(), "m.C");
  EXPECT_EQ(RootOf(tree)["k"].Int(), 9);
  EXPECT_EQ(RootOf(tree).State()["k"].Int(), 9);
  tree = Parse("ctorch\nSize\n(K\x02K\x03t\x85R.");
  EXPECT_EQ(RootOf(tree).AsShape(), (Shape{2, 3}));
  EXPECT_TRUE(RootOf(tree).IsSequence());
}

TEST(PickleTest, ACallIsNoNumber) {
  EXPECT_FALSE(RootOf(Parse("c_operator\nneg\nK\x05\x85R.")).Int());
  EXPECT_FALSE(RootOf(Parse("cm\nStage\nK\x05\x85R.")).Int());
}

TEST(PickleTest, DictsThatAreCalled) {
  const std::string pairs = Bytes(
      "](X\x01\0\0\0aK\x05\x86](X\x01\0\0\0bK\x06"
      "ee\x85R.");
  const std::string other = Bytes("}X\x01\0\0\0aK\x05sX\x01\0\0\0bK\x06s\x85R.");
  for (const std::string callee :
       {"ccollections\nOrderedDict\n", "ccollections\nCounter\n", "c__builtin__\ndict\n"}) {
    for (const std::string& arguments : {pairs, other}) {
      PickleTree tree = Parse(callee + arguments);
      EXPECT_TRUE(RootOf(tree).IsDict()) << callee;
      ASSERT_EQ(RootOf(tree).size(), 2u) << callee;
      EXPECT_EQ(RootOf(tree)["a"].Int(), 5);
      EXPECT_EQ(RootOf(tree)["b"].Int(), 6);
      EXPECT_EQ(RootOf(Parse(PrintPickle(tree).value()))["b"].Int(), 6);
    }
    // An unknown value is not an empty dict.
    EXPECT_FALSE(RootOf(Parse(callee + "K\x05\x85R.")).IsDict()) << callee;
    EXPECT_FALSE(RootOf(Parse(callee + "](K\x05\x85"
                                       "e\x85R."))
                     .IsDict())
        << callee;
  }
}

TEST(PickleTest, OnlyAPlainTensorIsOne) {
  const auto tensor = [](const std::string& more) {
    return Bytes(
               "ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\n"
               "X\x01\0\0\0"
               "0X\x03\0\0\0cpuK\x04tQK\0K\x04\x85K\x01\x85\x89"
               "ccollections\nOrderedDict\n)R") +
           more + "tR";
  };
  const std::string plain = tensor("");
  EXPECT_NE(RootOf(Parse(plain + ".")).Tensor(), nullptr);
  EXPECT_FALSE(RootOf(Parse(plain + ".")).IsOtherTensor());
  // A BUILD, which torch's legacy __setstate__ takes for set_; the neg bit.
  for (const std::string& other : {plain + "}b", tensor(Bytes("}X\x03\0\0\0neg\x88s"))}) {
    PickleTree tree = Parse(other + ".");
    EXPECT_EQ(RootOf(tree).Tensor(), nullptr);
    EXPECT_TRUE(RootOf(tree).IsOtherTensor());
  }
}

TEST(PickleTest, NothingRuns) {
  std::string marker = ::testing::TempDir() + "/ckptfs_pickle_ran";
  std::filesystem::remove(marker);
  std::string command = "touch " + marker;
  for (std::string module : {"os", "posix", "nt", "subprocess"}) {
    std::string pickle = "c" + module + "\nsystem\n(S'" + command + "'\ntR.";
    PickleTree tree = Parse(pickle);
    EXPECT_EQ(RootOf(tree).ClassName(), module + ".system");
    EXPECT_EQ(RootOf(tree).Arguments().at(0).String(), command);
    EXPECT_THAT(Reprint(pickle), HasSubstr(command));
  }
  EXPECT_FALSE(std::filesystem::exists(marker));
}

TEST(PickleTest, RefusesBrokenPrograms) {
  ExpectRefused("", "without a STOP");
  ExpectRefused("N", "without a STOP");
  ExpectRefused(".", "the stack is empty");
  ExpectRefused("0.", "the stack is empty");
  ExpectRefused("N(.", "the stack is empty");  // STOP may not reach below a mark
  ExpectRefused("K\x01(\x85.", "the stack is empty");
  ExpectRefused("t.", "no mark");
  ExpectRefused("1.", "no mark");
  ExpectRefused("NNa.", "not a list");
  ExpectRefused("](Ne(NNu.", "not a dict");
  ExpectRefused("}(Nu.", "key without a value");
  ExpectRefused("NNR.", "not a tuple");
  ExpectRefused("cm\nC\n)\x81}b}b.", "twice");
  ExpectRefused("]}b.", "not an object");
  ExpectRefused("h\x05.", "memoised as 5");
  ExpectRefused("g99999999999999999999\n.", "memo index");
  ExpectRefused("p-1\n.", "memo index");
  ExpectRefused("q\x01.", "the stack is empty");
  ExpectRefused("\x94.", "the stack is empty");
  ExpectRefused("NN\x93.", "not strings");
  ExpectRefused("c\n\n.", "without a name");
  ExpectRefused("\xff.", "no such opcode");
  ExpectRefused("\x80\x06N.", "protocol 6");
  ExpectRefused("\x82\x01.", "extension codes");
  ExpectRefused(Bytes("\x84\x01\0\0\0."), "extension codes");
  ExpectRefused("\x97.", "out-of-band");
  ExpectRefused("S'abc\n.", "not quoted");
  ExpectRefused("S'\\xg0'\n.", "escape");
  ExpectRefused("I12x\n.", "decimal");
  ExpectRefused("Fabc\n.", "number");
  ExpectRefused(Bytes("X\x02\0\0\0\xff\xfe."), "UTF-8");
}

TEST(PickleTest, RefusesImpossibleLengths) {
  ExpectRefused(Bytes("X\xff\xff\xff\xff."), "beyond the end");
  ExpectRefused(Bytes("\x8d\xff\xff\xff\xff\xff\xff\xff\xff."), "beyond the end");
  ExpectRefused(Bytes("\x8e\0\0\0\0\0\0\0\x80."), "beyond the end");
  ExpectRefused(Bytes("\x96\0\0\0\0\1\0\0\0."), "beyond the end");
  ExpectRefused(Bytes("\x95\xff\0\0\0\0\0\0\0N."), "frame");
  ExpectRefused(Bytes("\x8b\xff\xff\xff\xff."), "negative length");
  ExpectRefused(Bytes("\x8b\xff\xff\xff\x7f."), "beyond the end");
  ExpectRefused(Bytes("T\xff\xff\xff\xff."), "negative length");
  ExpectRefused(StrCat("L", std::string(5000, '9'), "L\n."), "4300");
  ExpectRefused(StrCat("I", std::string(100000, '1'), "\n."), "decimal");
  ExpectRefused("Vabc", "end of line");
}

TEST(PickleTest, EveryTruncationIsRefused) {
  std::string whole = Bytes(
      "\x80\x04\x95\x0f\0\0\0\0\0\0\0}(\x8c\x01"
      "aK\x01u\x94(K\x01t\x86.");
  ASSERT_TRUE(ParsePickle(whole).has_value());
  for (size_t length = 0; length < whole.size(); ++length) {
    EXPECT_FALSE(ParsePickle(std::string_view(whole).substr(0, length)).has_value()) << length;
  }
}

TEST(PickleTest, AMillionLevelsDeep) {
  constexpr size_t kDepth = 1'000'000;
  std::string tuples = StrCat("N", std::string(kDepth, '\x85'), ".");
  std::string lists = std::string(kDepth, ']') + std::string(kDepth - 1, 'a') + ".";
  for (const std::string& pickle : {tuples, lists}) {
    PickleTree tree = Parse(pickle);
    auto printed = PrintPickle(tree);
    ASSERT_TRUE(printed.has_value()) << printed.error().message;
    EXPECT_GE(ParsePickle(*printed)->tree.nodes.size(), kDepth);
    PickleBuilder builder;
    builder.Copy(RootOf(tree));
  }
}

TEST(PickleTest, BillionLaughsStaysSmall) {
  std::string pickle = "]q\x01";
  for (int i = 0; i < 100; ++i) pickle += "(h\x01h\x01h\x01h\x01h\x01lq\x01";
  pickle += ".";
  std::string printed = Reprint(pickle);
  EXPECT_LT(printed.size(), 5000u);
  EXPECT_LT(ParsePickle(printed)->tree.nodes.size(), 200u);
}

TEST(PickleTest, CallsCannotMultiplyMemory) {
  std::string list = StrCat("](", std::string(100000, 'N'), "eq\x01");
  for (int i = 0; i < 20000; ++i) list += "c__builtin__\nset\nh\x01\x85R0";
  ExpectRefused(list + ".", "multiply");
  std::string names = "cm\nA\nq\x01";  // getattr(getattr(...)): names that grow
  for (int i = 0; i < 200000; ++i)
    names += Bytes(
        "c__builtin__\ngetattr\nh\x01X\x01\0\0\0b\x86Rq\x01"
        "0");
  size_t text = 0;  // names stop growing at a limit, the rest stay calls
  for (const PickleNode& node : Parse(names + "h\x01.").nodes) text += node.text.size();
  EXPECT_LT(text, 2 * names.size());
}

TEST(PickleTest, TooManyValuesAreRefused) {
  std::string pickle = StrCat(std::string(1000, ']'), ".");
  EXPECT_TRUE(ParsePickle(pickle, 1000).has_value());
  auto refused = ParsePickle(pickle, 999);
  ASSERT_FALSE(refused.has_value());
  EXPECT_THAT(refused.error().message, HasSubstr("more than 999 values"));
}

TEST(PickleTest, SharingAndCyclesSurvivePrinting) {
  PickleTree tree =
      Parse(Reprint("]q\x01(h\x01K\x01\x86h\x01"
                    "e."));  // l = [(l, 1), l]
  PickleRef list = RootOf(tree);
  EXPECT_EQ(list.at(1).id(), list.id());
  EXPECT_EQ(list.at(0).at(0).id(), list.id());
  // A tuple that holds a list that holds the tuple.
  tree =
      Parse(Reprint("]q\x01h\x01\x85q\x02"
                    "0h\x01h\x02"
                    "a0h\x02."));
  EXPECT_EQ(RootOf(tree).at(0).at(0).id(), RootOf(tree).id());
  // An object whose arguments hold it.
  tree =
      Parse(Reprint("]q\x01"
                    "0cm\nC\nh\x01\x85Rq\x02"
                    "0h\x01h\x02"
                    "a0h\x02."));
  EXPECT_EQ(RootOf(tree).Arguments().at(0).at(0).id(), RootOf(tree).id());
}

TEST(PickleTest, WhatProtocol2CannotSayIsRefused) {
  PickleTree tree = Parse(Bytes("\x8b\x00\x01\x00\x00") + std::string(256, '\x11') + ".");
  EXPECT_THAT(PrintPickle(tree).error().message, HasSubstr("255 bytes"));
  PickleBuilder builder;
  NodeId bad = builder.Global("a\nb", "c");
  EXPECT_FALSE(PrintPickle(std::move(builder).Finish(bad)).has_value());
}

TEST(PickleTest, BuilderMakesWhatTheReaderReads) {
  PickleBuilder b;
  TensorNode tensor{.storage_class = {},
                    .dtype = DType::kF8E4M3,
                    .storage_key = "3",
                    .storage_elements = 6,
                    .shape = {2, 3},
                    .strides = {3, 1}};
  NodeId weight = b.Tensor(tensor);
  tensor.is_parameter = true;
  tensor.requires_grad = true;
  tensor.dtype = DType::kBF16;
  std::vector<std::pair<NodeId, NodeId>> items;
  items.emplace_back(b.String("w"), weight);
  items.emplace_back(b.String("p"), b.Tensor(tensor));
  items.emplace_back(b.String("size"), b.Size({2, 3}));
  items.emplace_back(b.Int(-5), b.Float(NAN));
  const NodeId top = b.OrderedDict(items);
  PickleTree built = std::move(b).Finish(top);
  PickleTree tree = Parse(PrintPickle(built).value());
  PickleRef root = RootOf(tree);
  EXPECT_EQ(root.ClassName(), "collections.OrderedDict");
  ASSERT_NE(root["w"].Tensor(), nullptr);
  EXPECT_EQ(root["w"].Tensor()->dtype, DType::kF8E4M3);
  EXPECT_EQ(root["w"].Tensor()->storage_elements, 6u);
  EXPECT_EQ(root["w"].Tensor()->strides, (std::vector<uint64_t>{3, 1}));
  EXPECT_TRUE(root["p"].Tensor()->is_parameter && root["p"].Tensor()->requires_grad);
  EXPECT_EQ(root["size"].AsShape(), (Shape{2, 3}));
  EXPECT_TRUE(std::isnan(*root.AtInt(-5).Number()));
}

TEST(PickleTest, CopyRenamesStoragesAndKeepsSharing) {
  PickleBuilder b;
  TensorNode tensor{
      .storage_class = {}, .storage_key = "0", .storage_elements = 1, .shape = {}, .strides = {}};
  NodeId shared = b.Tensor(tensor);
  const NodeId list = b.List({shared, shared, b.Int(1)});
  PickleTree first = std::move(b).Finish(list);
  PickleBuilder second;
  second.None();
  NodeId copy = second.Copy(RootOf(first), [](const TensorNode& t) { return t.storage_key + "7"; });
  PickleTree tree = std::move(second).Finish(copy);
  EXPECT_EQ(RootOf(tree).at(0).id(), RootOf(tree).at(1).id());
  EXPECT_EQ(RootOf(tree).at(0).Tensor()->storage_key, "07");
  EXPECT_EQ(RootOf(tree).at(2).Int(), 1);
}

}  // namespace
}  // namespace ckptfs
