package io.quire.spark

import org.apache.spark.sql.catalyst.encoders.ExpressionEncoder
import org.apache.spark.sql.catalyst.expressions.{Attribute, Expression}
import org.apache.spark.sql.catalyst.plans.logical.TransformWithStateInPySpark
import org.apache.spark.sql.execution.SparkPlan
import org.apache.spark.sql.execution.python.streaming.TransformWithStateInPySparkExec
import org.apache.spark.sql.execution.streaming.operators.stateful.StatefulOperatorStateInfo
import org.apache.spark.sql.execution.streaming.operators.stateful.transformwithstate.TransformWithStateExec
import org.apache.spark.sql.streaming.{OutputMode, StatefulProcessor, TimeMode}
import org.apache.spark.sql.types.StructType

/*
 * The nodes of transformWithState that accept Quire, as Spark 4.3 has them.
 *
 * Each takes the same parameters as the node it stands for, since plans are copied through the
 * constructor. A node equals only others of its own kind: were it equal to the one it stands for,
 * the plan would keep that one. In 4.2 and 4.3 the parameters differ, hence one file for each.
 */

/** The node for Scala and Java that accepts Quire. */
private[spark] class QuireTransformWithStateExec(
    keyDeserializer: Expression,
    valueDeserializer: Expression,
    groupingAttributes: Seq[Attribute],
    dataAttributes: Seq[Attribute],
    statefulProcessor: StatefulProcessor[Any, Any, Any],
    timeMode: TimeMode,
    outputMode: OutputMode,
    keyEncoder: ExpressionEncoder[Any],
    outputObjAttr: Attribute,
    stateInfo: Option[StatefulOperatorStateInfo],
    batchTimestampMs: Option[Long],
    prevBatchTimestampMs: Option[Long],
    eventTimeWatermarkForLateEvents: Option[Long],
    eventTimeWatermarkForEviction: Option[Long],
    child: SparkPlan,
    isStreaming: Boolean,
    isRealTimeMode: Boolean,
    hasInitialState: Boolean,
    initialStateGroupingAttrs: Seq[Attribute],
    initialStateDataAttrs: Seq[Attribute],
    initialStateDeserializer: Expression,
    initialState: SparkPlan)
  extends TransformWithStateExec(
    keyDeserializer, valueDeserializer, groupingAttributes, dataAttributes, statefulProcessor,
    timeMode, outputMode, keyEncoder, outputObjAttr, stateInfo, batchTimestampMs,
    prevBatchTimestampMs, eventTimeWatermarkForLateEvents, eventTimeWatermarkForEviction, child,
    isStreaming, isRealTimeMode, hasInitialState, initialStateGroupingAttrs,
    initialStateDataAttrs, initialStateDeserializer, initialState)
  with AcceptsQuire {

  override protected def withNewChildrenInternal(
      newLeft: SparkPlan, newRight: SparkPlan): TransformWithStateExec =
    QuireTransformWithStateExec(super.withNewChildrenInternal(newLeft, newRight))

  override def canEqual(other: Any): Boolean = other.isInstanceOf[QuireTransformWithStateExec]

  override def equals(other: Any): Boolean = canEqual(other) && super.equals(other)
}

private[spark] object QuireTransformWithStateExec {
  def apply(node: TransformWithStateExec): QuireTransformWithStateExec =
    new QuireTransformWithStateExec(
      node.keyDeserializer, node.valueDeserializer, node.groupingAttributes, node.dataAttributes,
      node.statefulProcessor, node.timeMode, node.outputMode, node.keyEncoder, node.outputObjAttr,
      node.stateInfo, node.batchTimestampMs, node.prevBatchTimestampMs,
      node.eventTimeWatermarkForLateEvents, node.eventTimeWatermarkForEviction, node.child,
      node.isStreaming, node.isRealTimeMode, node.hasInitialState, node.initialStateGroupingAttrs,
      node.initialStateDataAttrs, node.initialStateDeserializer, node.initialState)
}

/** The node for Python that accepts Quire. */
private[spark] class QuireTransformWithStateInPySparkExec(
    functionExpr: Expression,
    groupingAttributes: Seq[Attribute],
    outputAttrs: Seq[Attribute],
    outputMode: OutputMode,
    timeMode: TimeMode,
    stateInfo: Option[StatefulOperatorStateInfo],
    batchTimestampMs: Option[Long],
    prevBatchTimestampMs: Option[Long],
    eventTimeWatermarkForLateEvents: Option[Long],
    eventTimeWatermarkForEviction: Option[Long],
    userFacingDataType: TransformWithStateInPySpark.UserFacingDataType.Value,
    child: SparkPlan,
    isStreaming: Boolean,
    hasInitialState: Boolean,
    initialState: SparkPlan,
    initialStateGroupingAttrs: Seq[Attribute],
    initialStateSchema: StructType)
  extends TransformWithStateInPySparkExec(
    functionExpr, groupingAttributes, outputAttrs, outputMode, timeMode, stateInfo,
    batchTimestampMs, prevBatchTimestampMs, eventTimeWatermarkForLateEvents,
    eventTimeWatermarkForEviction, userFacingDataType, child, isStreaming, hasInitialState,
    initialState, initialStateGroupingAttrs, initialStateSchema)
  with AcceptsQuire {

  override protected def withNewChildrenInternal(
      newLeft: SparkPlan, newRight: SparkPlan): TransformWithStateInPySparkExec =
    QuireTransformWithStateInPySparkExec(super.withNewChildrenInternal(newLeft, newRight))

  override def canEqual(other: Any): Boolean =
    other.isInstanceOf[QuireTransformWithStateInPySparkExec]

  override def equals(other: Any): Boolean = canEqual(other) && super.equals(other)
}

private[spark] object QuireTransformWithStateInPySparkExec {
  def apply(node: TransformWithStateInPySparkExec): QuireTransformWithStateInPySparkExec =
    new QuireTransformWithStateInPySparkExec(
      node.functionExpr, node.groupingAttributes, node.outputAttrs, node.outputMode,
      node.timeMode, node.stateInfo, node.batchTimestampMs, node.prevBatchTimestampMs,
      node.eventTimeWatermarkForLateEvents, node.eventTimeWatermarkForEviction,
      node.userFacingDataType, node.child, node.isStreaming, node.hasInitialState,
      node.initialState, node.initialStateGroupingAttrs, node.initialStateSchema)
}
